"""What few bits cost in loss."""

from __future__ import annotations
