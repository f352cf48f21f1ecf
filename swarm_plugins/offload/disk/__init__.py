"""How bytes travel: disk to RAM, RAM to device."""

from __future__ import annotations
