"""What running blocks of one model version takes: whom to ask, how to ask, and what adapters are called."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarm_plugins.client.digests import DigestCache

if TYPE_CHECKING:
    from swarm_plugins.client.peers import Peers
    from swarm_plugins.client.view import SwarmView

__all__ = ["Servers"]


@dataclass(frozen=True)
class Servers:
    """The servers of one model version, as one client reaches them."""

    peers: Peers
    """Sends requests."""
    view: SwarmView
    """Plans chains."""
    digests: DigestCache = field(default_factory=DigestCache)
    """Names adapters."""
