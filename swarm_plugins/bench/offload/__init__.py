"""Decoding with offloaded experts, beside accelerate and resident weights."""

from __future__ import annotations
