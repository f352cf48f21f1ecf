"""Bans peers that fail, each time twice as long as before."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import NamedTuple

_MAX_PEERS = 4096
"""Peers whose failures are remembered; above this, the one that failed first is forgotten."""
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 2.0
"""Pauses before a banned peer is asked for what no other peer has."""


class _Failure(NamedTuple):
    strikes: int
    at: float
    reason: str


class Ban(NamedTuple):
    """Why a peer is banned, and for how long still."""

    left_s: float
    strikes: int
    """Failures since it last answered."""
    reason: str


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
        self._failures: dict[str, _Failure] = {}
        """In the order of the last failures."""

    def ban(self, peer: str, reason: str = "") -> float:
        """Bans a peer and returns for how many seconds."""
        known = self._failures.pop(peer, None)
        failure = _Failure(1 if known is None else known.strikes + 1, self._clock(), reason)
        self._failures[peer] = failure
        if len(self._failures) > _MAX_PEERS:
            self.forgive(next(iter(self._failures)))
        return self._length_s(failure)

    def forgive(self, peer: str) -> None:
        """Forgets the failures of a peer that has answered."""
        self._failures.pop(peer, None)

    def banned(self) -> list[str]:
        """Returns the peers that are banned now, the one that failed longest ago first."""
        return [peer for peer in self._failures if self.is_banned(peer)]

    def details(self) -> dict[str, Ban]:
        """Returns the peers that are banned now, and why; other threads may call it."""
        now = self._clock()
        left = {
            peer: Ban(one.at + self._length_s(one) - now, one.strikes, one.reason)
            for peer, one in self._failures.copy().items()
        }
        return {peer: ban for peer, ban in left.items() if ban.left_s > 0}

    def is_banned(self, peer: str) -> bool:
        """Returns whether the peer is banned now."""
        failure = self._failures.get(peer)
        return failure is not None and self._clock() < failure.at + self._length_s(failure)

    def usable(self, shares: Mapping[str, Collection[Hashable]], *, copies: int = 1) -> list[str]:
        """Returns the peers that are not banned, and banned ones that have what fewer than ``copies`` others have.

        Of several banned ones that have the same, those that failed longest ago are taken.

        Args:
            shares: What each peer has, such as its blocks.
            copies: How many peers should have each part.
        """
        banned = [peer for peer in self.banned() if peer in shares]
        excluded = set(banned)
        peers = [peer for peer in shares if peer not in excluded]
        if banned:
            holders = Counter(part for peer in peers for part in shares[peer])
            for peer in banned:
                if any(holders[part] < copies for part in shares[peer]):
                    peers.append(peer)
                    holders.update(shares[peer])
        return peers

    def pause_s(self, peer: str) -> float:
        """Returns how long to wait before a banned peer is asked for what no other has; 0 for other peers."""
        failure = self._failures.get(peer)
        if failure is None:
            return 0.0
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(failure.strikes - 1, 32), _LONGEST_PAUSE_S)
        return max(0.0, failure.at + pause_s - self._clock())

    def _length_s(self, failure: _Failure) -> float:
        # The exponent is bounded, so that a peer that fails for days cannot overflow the float.
        return min(self.base_s * 2.0 ** min(failure.strikes - 1, 32), self.max_s)
