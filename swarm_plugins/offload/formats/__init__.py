"""What the bytes of an expert mean, and how to multiply with them."""

from __future__ import annotations

__all__: list[str] = []
