"""Who takes part in a run, by what peers have said of themselves. Knows no network and no tensors."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from swarm_plugins.transport.run_messages import RunStatus

_FORGOTTEN = 6
"""A peer is forgotten after so many times the silence after which it counts as lost."""


class Place(NamedTuple):
    """A shared state, named by its round and digest."""

    round: int
    digest: bytes


class Roster:
    """The other peers of a run.

    Args:
        run: The run's hash.
        me: Id of this peer.
        dead_s: Silence after which a peer counts as lost.
        max_peers: Most peers, this one included.
    """

    def __init__(self, run: bytes, me: str, *, dead_s: float, max_peers: int) -> None:
        self._run = run
        self._me = me
        self._dead_s = dead_s
        self._max_others = max_peers - 1
        self._statuses: dict[str, RunStatus] = {}
        self._heard_at: dict[str, float] = {}
        """When, in seconds of a steady clock; of all peers that have been admitted, those that have left too."""
        self._apart: dict[str, float] = {}

    def heard(self, peer: str, status: RunStatus, now: float) -> bool:
        """Notes what a peer said of itself; returns False if the run is full."""
        # Never changed in place: the trainer's thread reads them.
        heard = {one: at for one, at in self._heard_at.items() if now - at <= _FORGOTTEN * self._dead_s}
        statuses = {one: known for one, known in self._statuses.items() if one in heard}
        is_full = peer not in statuses and len(self.living(now)) >= self._max_others
        if status.is_leaving:
            statuses.pop(peer, None)
        elif not is_full:
            statuses[peer], heard[peer] = status, now
        self._heard_at, self._statuses = heard, statuses
        return status.is_leaving or not is_full

    @property
    def known(self) -> frozenset[str]:
        """Peers that have been heard in this run lately, those that have left too, and this one."""
        return frozenset((*self._heard_at, self._me))

    def living(self, now: float) -> dict[str, RunStatus]:
        """Returns the peers that have been heard of lately."""
        heard = self._heard_at
        return {
            peer: status
            for peer, status in self._statuses.items()
            if now - heard.get(peer, float("-inf")) <= self._dead_s
        }

    def turn(self, round_: int, peers: Iterable[str]) -> int:
        """Returns how many of some peers come before this one in closing a round: its coordinator is the first."""
        own = self._rank(f"round {round_}", self._me)
        return sum(self._rank(f"round {round_}", peer) < own for peer in peers)

    def publisher(self, now: float) -> str:
        """Returns the peer that publishes for all."""
        return min((*self.living(now), self._me), key=lambda peer: self._rank("publisher", peer))

    def most_agreed(
        self, own: Place | None, past: Collection[bytes], partners: Collection[str] | None, now: float
    ) -> Place | None:
        """Returns the shared state that most peers have; of equals the furthest.

        Args:
            own: This peer's state. None: it takes any other.
            past: Digests of states that this peer has left behind: those who have them are on their way.
            partners: The only peers that count, with whom this one has trained. None: all.
            now: In seconds of a steady clock.
        """
        others = (
            Place(status.round, status.state)
            for peer, status in self.living(now).items()
            if partners is None or peer in partners
        )
        counts = Counter(place for place in others if place.digest and place.digest not in past)
        if own is not None:
            counts[own] += 1
        return max(counts, key=lambda place: (counts[place], place), default=None)

    def apart(self, own: Place, past: Collection[bytes], partners: Collection[str], now: float) -> dict[str, float]:
        """Returns living peers that have not trained with this one, and have other states; and since when."""
        others = [
            peer
            for peer, status in self.living(now).items()
            if peer not in partners and status.state and status.state != own.digest and status.state not in past
        ]
        self._apart = {peer: self._apart.get(peer, now) for peer in others}
        return self._apart

    def _rank(self, purpose: str, peer: str) -> bytes:
        """Returns a peer's place in an order of all peers that no peer has chosen for itself alone."""
        return hashlib.blake2b(self._run + f"{purpose}\0{peer}".encode(), digest_size=16).digest()
