"""The measurements behind `swarm bench`."""

from __future__ import annotations

__all__: list[str] = []
