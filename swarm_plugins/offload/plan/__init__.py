"""Memory layout and expected speed for a budget."""

from __future__ import annotations
