"""Finds out by running a model what a span has to know of it."""

from __future__ import annotations

from swarm_plugins.blocks.probing.packs import has_fixed_positions
from swarm_plugins.blocks.probing.probe import Traits, probe

__all__ = ["Traits", "has_fixed_positions", "probe"]
