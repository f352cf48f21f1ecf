"""Generates text for requests, each in a thread of its own; knows nothing of HTTP."""

from __future__ import annotations
