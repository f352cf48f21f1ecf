"""Which peers have sent work lately, and the rhythm of the sessions on each range of blocks."""

from __future__ import annotations

from swarm_plugins.recent import Recent
from swarm_plugins.server.compute.rhythm import Rhythm

_MOST_PEERS = 64
"""Peers whose last work is remembered."""
_MOST_RHYTHMS = 32
"""Ranges of blocks whose forwards are remembered."""
_LATELY_S = 1.0
"""A peer whose last work came within this time is about to send more."""


class Arrivals:
    """Remembers when work came. Used by one thread."""

    def __init__(self) -> None:
        self._peers: Recent[str, float] = Recent(_MOST_PEERS)
        """When the peers' last steps or training came."""
        self._rhythms: Recent[range, Rhythm] = Recent(_MOST_RHYTHMS)

    def came(self, peer: str, now: float) -> None:
        """Notes that a peer has sent a step or training."""
        self._peers[peer] = now

    def are_shared(self, now: float) -> bool:
        """Returns whether several peers have sent work lately."""
        return sum(at > now - _LATELY_S for at in self._peers.values()) > 1

    def rhythm(self, blocks: range) -> Rhythm:
        """Returns the rhythm of the sessions on these blocks: only they share forwards."""
        found = self._rhythms[blocks] = self._rhythms.get(blocks) or Rhythm()
        return found
