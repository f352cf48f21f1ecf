"""Arguments, output and tables shared by commands."""

from __future__ import annotations
