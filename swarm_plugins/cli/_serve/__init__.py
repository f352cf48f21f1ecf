"""What ``swarm serve`` is made of."""

from __future__ import annotations
