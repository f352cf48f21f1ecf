"""Spot checks of servers' answers, and the quarantine of those caught with a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from swarm_plugins.checkpoint.range_cache import default_cache
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.observer import CallObserver, NoObserver
from swarm_plugins.client.view import Servers
from swarm_plugins.verification.local_blocks import LocalBlocks
from swarm_plugins.verification.quarantine import Quarantine
from swarm_plugins.verification.verifier import Verifier

if TYPE_CHECKING:
    from swarm_plugins.checkpoint import Checkpoint

__all__ = ["Quarantine", "Verifier", "make_observer"]


def make_observer(servers: Servers, open_checkpoint: Callable[[], Checkpoint]) -> CallObserver:
    """Returns the observer that a client's settings ask for."""
    config: SwarmConfig = servers.view.config
    if config.verify == "off" or config.allowed_peers is not None:
        return NoObserver()
    blocks = LocalBlocks(open_checkpoint, limit_bytes=config.verify_bytes)
    folder = default_cache()
    return Verifier(
        blocks,
        Quarantine(folder / "quarantine.json"),
        evidence=folder / "evidence",
        version=str(servers.view.version),
    )
