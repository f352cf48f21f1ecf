"""Behind ``swarm fit``."""

from __future__ import annotations
