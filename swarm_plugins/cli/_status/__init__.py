"""What ``swarm status`` is made of."""

from __future__ import annotations
