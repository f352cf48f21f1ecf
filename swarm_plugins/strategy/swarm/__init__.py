"""The strategy ``swarm``: blocks run on the swarm; adapters, heads and optimizer stay here."""

from __future__ import annotations
