"""Who takes part in a run, by what peers have said of themselves. Knows no network and no tensors."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from swarm_plugins.recent import Recent
from swarm_plugins.transport.run_messages import MAX_RUN_PEERS, RunStatus

_FORGOTTEN = 6
"""A peer is forgotten after so many times the silence after which it counts as lost."""
_MOST_PARTNERS = 4 * MAX_RUN_PEERS
_MOST_RULED_OUT = 4 * MAX_RUN_PEERS


class Place(NamedTuple):
    """A shared state, named by its round and digest."""

    round: int
    digest: bytes


class Roster:
    """The other peers of a run.

    Args:
        run: The run's hash.
        me: Id of this peer.
        place: This peer's state.
        dead_s: Silence after which a peer counts as lost.
        max_peers: Most peers, this one included.
    """

    def __init__(self, run: bytes, me: str, place: Place, *, dead_s: float, max_peers: int) -> None:
        self._run = run
        self._me = me
        self.place = place
        """This peer's state."""
        self._past: set[bytes] = set()
        """Digests of states that it has left behind: those who have them are on their way."""
        self._ruled_out = Recent[Place, frozenset[str]](_MOST_RULED_OUT)
        """States that peers were asked for in vain, and these peers."""
        self._dead_s = dead_s
        self._max_others = max_peers - 1
        self._statuses: dict[str, RunStatus] = {}
        self._heard_at: dict[str, float] = {}
        """When, in seconds of a steady clock; of all peers that have been admitted, those that have left too."""
        self._partners: set[str] = set()
        """Peers that have had a state of this one's, now or earlier: they train with it."""
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
            self._note_partner(peer, status)
        self._heard_at, self._statuses = heard, statuses
        return status.is_leaving or not is_full

    def forget(self, peer: str) -> None:
        """Drops a peer that takes part no longer."""
        self._statuses = {one: status for one, status in self._statuses.items() if one != peer}

    def enter(self, place: Place) -> None:
        """Notes that this peer has another state."""
        self._past.add(self.place.digest)
        self.place = place
        for peer, status in self._statuses.items():
            self._note_partner(peer, status)

    def rule_out(self, place: Place, peers: Iterable[str]) -> None:
        """Notes that peers did not have a state that they had announced; others may have it."""
        if refused := frozenset(peers):
            self._ruled_out[place] = self._ruled_out.get(place, frozenset()) | refused

    def holders(self, place: Place, now: float) -> list[str]:
        """Returns the living peers that have a state, and have not been asked for it in vain."""
        living = self.living(now).items()
        return [peer for peer, status in living if self._place_of(peer, status) == place]

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

    def members(self, now: float) -> dict[str, RunStatus]:
        """Returns the living peers that have a vote: they train with this one."""
        return {peer: one for peer, one in self.living(now).items() if peer in self._partners and one.state}

    def publisher(self, now: float) -> str:
        """Returns the peer that publishes for all."""
        return min((*self.living(now), self._me), key=self._rank)

    def most_agreed(self, now: float, *, is_counted: bool) -> Place | None:
        """Returns the state that most peers have, for one without work of its own; of equals the furthest.

        Args:
            now: In seconds of a steady clock.
            is_counted: Whether this peer's own state counts.
        """
        counts = self._counts(self.living(now))
        counts.update([self.place] if is_counted else [])
        return max(counts, key=lambda place: (counts[place], place), default=None)

    def majority(self, now: float) -> Place | None:
        """Returns the state that more than half of this peer and the members have; a tie displaces no work."""
        members = self.members(now)
        counts = self._counts(members)
        counts[self.place] += 1
        return next((place for place, count in counts.items() if 2 * count > len(members) + 1), None)

    def apart(self, now: float) -> dict[str, float]:
        """Returns living peers whose state is neither this one's nor one that it has had; and since when."""
        others = [
            peer
            for peer, status in self.living(now).items()
            if status.state and status.state != self.place.digest and status.state not in self._past
        ]
        self._apart = {peer: self._apart.get(peer, now) for peer in others}
        return self._apart

    def _counts(self, statuses: Mapping[str, RunStatus]) -> Counter[Place]:
        places = (self._place_of(peer, status) for peer, status in statuses.items())
        return Counter(place for place in places if place is not None)

    def _place_of(self, peer: str, status: RunStatus) -> Place | None:
        """Returns a peer's state, if that may be taken over."""
        place = Place(status.round, status.state)
        is_passed = not place.digest or place.digest in self._past or peer in self._ruled_out.get(place, ())
        return None if is_passed else place

    def _note_partner(self, peer: str, status: RunStatus) -> None:
        if status.state and (status.state == self.place.digest or status.state in self._past):
            if len(self._partners) >= _MOST_PARTNERS:
                self._partners &= set(self._statuses)
            self._partners.add(peer)

    def _rank(self, peer: str) -> bytes:
        """Returns a peer's place in an order of all peers that no peer has chosen for itself alone."""
        return hashlib.blake2b(self._run + f"publisher\0{peer}".encode(), digest_size=16).digest()
