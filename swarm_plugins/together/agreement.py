"""Agreement of a run's peers on what closes a round. Knows no network, no tensors and no clock.

The phases are those of Tendermint (Buchman, Kwon & Milosevic 2018, arXiv 1807.04938, algorithm 1), and one between
prevote and precommit that is amplified as in Bracha 1987 ("Asynchronous Byzantine agreement protocols", section 3).
Votes are neither signed nor passed on: a peer counts what members tell it themselves, so a liar can tell each another
vote. What one peer may act on must become visible to all without the liars' votes; that is what keys are for.

A round is closed in views 0, 1, 2... In each, one member proposes a value, the digest of a list of contributions.

1. **Prevote**: a member names the proposed value, if it approves of it and its lock allows it.
2. **Key**: it has seen prevotes of a quorum in this view. A member also names a key that more than a third have named.
3. **Lock**: it has seen keys of a quorum in the view that it is in. From then on it prevotes another value only if it
   has seen keys of a quorum for that in a later view.
4. The value is **decided** with locks of a quorum in one view.

A quorum is more than two thirds of the members. Let N be honest and m < N/2 hostile, h <= m of which a peer sees. There
are more than 2(N + h)/3 - h >= (2N - m)/3 > N/2 honest votes in its quorum, so

- two quorums share an honest peer, whichever members each peer sees: no two values are decided;
- the honest keys behind a lock are more than N/2, which is more than a third of N + m: all honest peers name that key
  as well, and as N > 2(N + m)/3, all see a quorum for it. So an honest proposer knows of every lock, and its value
  passes;
- N honest peers are a quorum by themselves, and hostile ones are less than a third: these can stop nothing, and
  cannot move anybody to a later view;
- the clock of a view starts when a quorum has reached it. That includes more than N/2 honest peers, whose votes bring
  all others there, so the views of honest peers overlap, although each peer has its own lengths.

This holds as long as honest peers hear each other in time: members that are silent for long are not counted. One that
is restarted with its key has forgotten its votes, so it counts as hostile for the rest of that round.

Members may come while a round is closed; what a peer was misled to when it was alone with a liar must not hold up all:

- a lock binds only while more than a third of today's members name a key for its value, and once views have passed in
  which all could have named it, while a quorum does. With fixed members that is always so: see the second point;
- when a third member comes, a peer goes back to the view of the others. Two decide only if both are locked, and they
  stay so.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

from swarm_plugins.transport.run_messages import MAX_KEYS, Mark, Votes

_VIEWS_OF_A_LENGTH = 4
"""A liar who contributes last can choose an update that makes liars the first in some views. These must not be long."""
_MOST_DOUBLINGS = 10
_MOST_SKIPPED = 1 << 20
"""Views that others call a peer over at once; numbers that messages cannot carry stay out of reach."""
_VIEWS_TO_SPREAD = 4
"""In so many views, each as long as a silent peer is counted or longer, all honest peers have heard of a key."""


class Agreement:
    """Agrees with the other members on the value of one round.

    Args:
        about: Names the round; the order of proposers follows from it.
        me: Id of this peer.
        view_s: Length of the first views in seconds; it doubles after some of them.
        most_view_s: Longest view, in seconds.
    """

    def __init__(self, about: bytes, me: str, *, view_s: float, most_view_s: float) -> None:
        self._about = about
        self._me = me
        self._view_s = view_s
        self._most_view_s = most_view_s
        self.votes = Votes()
        """What this peer tells others."""
        self._since: float | None = None
        """When a quorum was in this view; None before."""
        self._num_waited = self._num_waited_locked = 0
        """Views that have ended here because their time was over; since this peer locked."""
        self._was_alone = True
        """Whether there has been one other member at most."""
        self._approved: set[bytes] = set()
        self._known: Mark | None = None
        """The latest key that a quorum has named."""
        self._others: Mapping[str, Votes] = {}
        self._decided: Mapping[str, bytes] = {}

    def hear(self, others: Mapping[str, Votes], decided: Mapping[str, bytes]) -> None:
        """Notes what the other members say, and joins a later view if more than a third are in it.

        Args:
            others: Votes of the other members; of the silent ones too, which have none.
            decided: What members have closed the round with that have gone on: their vote in all views and phases.
        """
        self._others, self._decided = others, decided
        views = sorted((votes.view for votes in (*others.values(), self.votes)), reverse=True)
        latest = min(views[len(views) // 3], self.votes.view + _MOST_SKIPPED)
        is_first_company, self._was_alone = self._was_alone and len(views) > 2, self._was_alone and len(views) <= 2
        if is_first_company:
            self._num_waited = 0
        if latest > self.votes.view or (is_first_company and latest < self.votes.view):
            self._enter(latest)

    @property
    def proposer(self) -> str:
        """The member that proposes in this view, by a hash: a peer cannot choose its id for it."""
        seed = self._about + self.votes.view.to_bytes(8, "big")
        return min((*self._others, self._me), key=lambda peer: hashlib.blake2b(seed + peer.encode()).digest())

    def preferred(self) -> bytes | None:
        """Returns the value that this peer must propose, since others may be locked on it; None: any."""
        if self._known is not None:
            return self._known.value
        return next((value for value in sorted(self._decided.values()) if self.is_vouched(value)), None)

    def supporters(self, value: bytes) -> list[str]:
        """Returns the other members that vote for a value, in whatever view and phase."""
        return [
            peer
            for peer, votes in self._others.items()
            if self._decided.get(peer) == value
            or any(mark.value == value for phase in (_prevotes, _keys, _locks) for mark in phase(votes))
        ]

    def is_vouched(self, value: bytes) -> bool:
        """Returns whether so many members vote for a value that one of them is honest."""
        return 3 * len(self.supporters(value)) > self._num_members

    def advance(
        self, now: float, *, proposal: bytes | None, approves: Callable[[bytes], bool], is_due: bool
    ) -> bytes | None:
        """Takes the steps that the votes of others allow; returns the value once it is decided.

        Args:
            now: In seconds of a steady clock.
            proposal: What this view's proposer has proposed, if that is known.
            approves: Whether a value may be prevoted; asked at each call until it may.
            is_due: Whether the round can be closed now; the first view's time does not run before.
        """
        if proposal is not None:
            self._prevote(proposal, approves)
        self._name_keys()
        self._lock()
        done = self._quorums(_locks)
        if not done:
            self._end_view(now, is_due)
        return done[-1].value if done else None

    @property
    def _num_members(self) -> int:
        return len(self._others) + 1

    @property
    def _quorum(self) -> int:
        return 2 * self._num_members // 3 + 1

    def _enter(self, view: int) -> None:
        self.votes, self._since = msgspec.structs.replace(self.votes, view=view), None

    def _end_view(self, now: float, is_due: bool) -> None:
        if self._since is None:
            self._since = now if (is_due or self.votes.view > 0) and self._has_company() else None
            return
        # Views that others have called this peer over make none longer: a liar could have chosen where its own follow.
        doublings = min(self._num_waited // _VIEWS_OF_A_LENGTH, _MOST_DOUBLINGS)
        lasts_s = min(self._view_s * 2**doublings, self._most_view_s)
        if now - self._since > lasts_s:
            self._num_waited += 1
            self._num_waited_locked += 1
            self._enter(self.votes.view + 1)

    def _has_company(self) -> bool:
        """Returns whether a quorum is in this view or a later one.

        Without it, a peer that has waited in fewer views has shorter ones, and would stay ahead of the others for ever.
        """
        num_here = 1 + sum(
            votes.view >= self.votes.view or peer in self._decided for peer, votes in self._others.items()
        )
        return num_here >= self._quorum

    def _prevote(self, value: bytes, approves: Callable[[bytes], bool]) -> None:
        votes = self.votes
        if votes.prevote is not None and votes.prevote.view == votes.view:
            return
        lock, known = votes.lock, self._known
        is_free = lock is None or lock.value == value or not self._binds(lock)
        is_released = lock and known and known.value == value and known.view > lock.view
        # What was approved once stays so: a value that others are locked on must pass in the end.
        if (is_free or is_released) and (value in self._approved or approves(value)):
            self._approved.add(value)
            self.votes = msgspec.structs.replace(votes, prevote=Mark(votes.view, value))

    def _binds(self, lock: Mark) -> bool:
        """Returns whether enough members still know of a lock's value."""
        has_spread = self._num_waited_locked >= _VIEWS_TO_SPREAD
        num_enough = (2 if has_spread else 1) * self._num_members // 3 + 1
        # A key of a later view for the same value takes the place of the lock's own in what peers name.
        num_naming = sum(
            self._decided.get(peer) == lock.value
            or any(key.value == lock.value and key.view >= lock.view for key in votes.keys)
            for peer, votes in (*self._others.items(), (self._me, self.votes))
        )
        return num_naming >= num_enough

    def _name_keys(self) -> None:
        """Names keys; each states what this peer has seen, so it may be of any view."""
        named = {mark.view: mark for mark in self._marks(_keys, at_least=self._num_members // 3 + 1)}
        named |= {mark.view: mark for mark in (*self._quorums(_prevotes), *self.votes.keys)}
        keys = tuple(named[view] for view in sorted(named)[-MAX_KEYS:])
        self.votes = msgspec.structs.replace(self.votes, keys=keys)

    def _lock(self) -> None:
        """Learns of keys that a quorum has named, and locks on that of this view.

        Not on an earlier view's: this peer may have prevoted something else since.
        """
        for mark in self._quorums(_keys):
            if self._known is None or mark.view > self._known.view:
                self._known = mark
            if mark.view == self.votes.view and (self.votes.lock is None or self.votes.lock.view < mark.view):
                self.votes, self._num_waited_locked = msgspec.structs.replace(self.votes, lock=mark), 0

    def _quorums(self, phase: Callable[[Votes], Iterable[Mark]]) -> list[Mark]:
        return self._marks(phase, at_least=self._quorum)

    def _marks(self, phase: Callable[[Votes], Iterable[Mark]], *, at_least: int) -> list[Mark]:
        """Returns what so many members, this one included, have voted for in one phase; by view."""
        # Those that have gone on are counted in each view that is in question, and in this one.
        votes = [votes for peer, votes in (*self._others.items(), (self._me, self.votes)) if peer not in self._decided]
        counts = Counter(mark for one in votes for mark in {*phase(one)})
        decided = Counter(self._decided.values())
        marks = {*counts, *(Mark(self.votes.view, value) for value in decided)}
        enough = (mark for mark in marks if counts[mark] + decided[mark.value] >= at_least)
        return sorted(enough, key=lambda mark: (mark.view, mark.value))


def _prevotes(votes: Votes) -> Iterable[Mark]:
    return () if votes.prevote is None else (votes.prevote,)


def _keys(votes: Votes) -> Iterable[Mark]:
    return votes.keys


def _locks(votes: Votes) -> Iterable[Mark]:
    return () if votes.lock is None else (votes.lock,)
