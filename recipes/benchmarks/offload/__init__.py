"""Decoding with offloaded experts, against accelerate and resident weights."""

from __future__ import annotations
