"""Shared by commands: arguments, output, tables."""

from __future__ import annotations
