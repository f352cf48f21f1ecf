"""Bans peers that fail, each time twice as long as before."""

from __future__ import annotations

import time
from collections.abc import Callable

_MAX_PEERS = 4096
"""Peers whose failures are remembered; above this, the one that failed first is forgotten."""


class BanList:
    """Remembers failures of peers.

    Args:
        base_s: Seconds of the first ban.
        max_s: Longest ban.
        clock: Monotonic seconds; tests pass their own.
    """

    def __init__(
        self, *, base_s: float = 2.0, max_s: float = 300.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.base_s = base_s
        self.max_s = max_s
        self._clock = clock
        self._strikes: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def ban(self, peer: str) -> float:
        """Bans a peer and returns for how many seconds."""
        strikes = self._strikes.get(peer, 0)
        self._strikes[peer] = strikes + 1
        # The exponent is bounded, so that a peer that fails for days cannot overflow the float.
        seconds = min(self.base_s * 2.0 ** min(strikes, 32), self.max_s)
        self._until.pop(peer, None)
        self._until[peer] = self._clock() + seconds
        if len(self._until) > _MAX_PEERS:
            self.forgive(next(iter(self._until)))
        return seconds

    def forgive(self, peer: str) -> None:
        """Forgets the failures of a peer that has answered."""
        self._strikes.pop(peer, None)
        self._until.pop(peer, None)

    def banned(self) -> list[str]:
        """Returns the peers that are banned now."""
        return [peer for peer in self._until if self.is_banned(peer)]

    def is_banned(self, peer: str) -> bool:
        """Returns whether the peer is banned now."""
        return self._clock() < self._until.get(peer, float("-inf"))
