"""One round at one peer: who has contributed what, which records are fair, and the state after it. Knows no network."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from swarm_plugins.errors import ProtocolError
from swarm_plugins.together.config import RunConfig
from swarm_plugins.together.outer import SharedState, Update, combine, outer_step, read_update
from swarm_plugins.transport.run_messages import Contribution, RoundRecord, RunStatus

log = logging.getLogger(__name__)

_MIN_STEPS_PART = 0.25
"""Of its own steps for a round, a peer makes this part before it gives way to a faster one."""
_PATIENCE_PART = 0.5
"""Of ``straggler_s``, after which it gives way with however many steps it has."""


class Round:
    """What a peer knows of the round that it is in.

    Args:
        state: The shared state with which the round begins.
        me: Id of this peer.
        config: Settings.
        absent: Peers that were left out of the round before; they are not waited for until they contribute.
    """

    def __init__(self, state: SharedState, me: str, config: RunConfig, absent: frozenset[str] = frozenset()) -> None:
        self.state = state
        self._me = me
        self._absent = absent
        self._config = config
        self.shapes = state.shapes
        self.contributions: dict[str, Contribution] = {}
        """By peer, this one included."""
        self._updates: dict[bytes, Update | None] = {}
        """Those that are here, by their digest; None: invalid."""
        self._came: dict[bytes, float] = {}
        """When each came."""
        self._lost: set[bytes] = set()
        self._closing_since: float | None = None

    @property
    def closing_s(self) -> float:
        """How long the round has been closing; 0 before anyone has contributed."""
        return 0.0 if self._closing_since is None else max(1e-9, time.monotonic() - self._closing_since)

    @property
    def is_full(self) -> bool:
        """Whether so many updates are here that no more are fetched: one key can sign any number."""
        return len(self._updates) >= 4 * self._config.max_peers

    def missing(self, contributions: Iterable[Contribution]) -> list[bytes]:
        """Returns the updates that are not here."""
        return [one.blob for one in contributions if one.blob not in self._updates]

    @property
    def offered(self) -> list[bytes]:
        """Updates that others have contributed and that are not here, without those that no peer has."""
        return [blob for blob in self.missing(self.contributions.values()) if blob not in self._lost]

    def add(self, peer: str, contribution: Contribution) -> bool:
        """Notes a peer's first contribution to this round; returns whether it is new."""
        is_of_this = (contribution.round, contribution.base) == (self.state.round, self.state.digest)
        is_full = len(self.contributions) >= self._config.max_peers and peer != self._me
        if not is_of_this or is_full or peer in self.contributions:
            return False
        self.contributions[peer] = contribution
        if self._closing_since is None:
            self._closing_since = time.monotonic()
        return True

    def add_update(self, digest: bytes, blob: bytes) -> None:
        """Notes an update that has come. If it cannot be read, it is left out here as by all others."""
        self._came.setdefault(digest, time.monotonic())
        try:
            self._updates[digest] = read_update(blob, self.shapes)
        except ProtocolError as error:
            owner = next((peer for peer, one in self.contributions.items() if one.blob == digest), "a peer")
            log.warning("left out of round %d: %s has sent %s", self.state.round, owner, error)
            self._updates[digest] = None

    def give_up(self, digest: bytes) -> None:
        """Marks an update as lost: this peer proposes to close the round without it."""
        self._lost.add(digest)

    def has_all(self, record: RoundRecord) -> bool:
        """Returns whether all updates of a record are here, and can be read."""
        return all(self._updates.get(one.blob) is not None for one in record.contributions)

    def is_fair(self, record: RoundRecord, living: Mapping[str, RunStatus]) -> bool:
        """Returns whether a record leaves out no more than it may.

        Before the deadline, no living peer may be late as far as this peer knows, itself included, and all that have
        contributed are listed; after it, at least half of them, and all whose updates a proposer has had time to fetch:
        else it could list itself and as few others as it likes.
        """
        blobs = {one.blob for one in record.contributions}
        usable = [one.blob for one in self._usable(living).values()]
        here = [blob for blob in usable if blob in self._updates]
        settled_since = time.monotonic() - self._config.dead_s
        settled = [blob for blob in here if self._came[blob] <= settled_since]
        if self._is_over and blobs.issuperset(settled) and 2 * sum(blob in blobs for blob in here) >= len(here):
            return True
        return blobs.issuperset(usable) and not self.late(living)

    @property
    def _is_over(self) -> bool:
        return self.closing_s > self._config.straggler_s

    def _usable(self, living: Mapping[str, RunStatus]) -> dict[str, Contribution]:
        """Returns the contributions of living peers, this one included, that are not lost or broken."""
        return {
            peer: one
            for peer, one in sorted(self.contributions.items())
            if (peer in living or peer == self._me)
            and one.blob not in self._lost
            and self._updates.get(one.blob, ...) is not None
        }

    def late(self, living: Mapping[str, RunStatus]) -> list[str]:
        """Returns the peers the round waits for: they train in it, or are about to enter it."""
        return sorted(
            peer
            for peer, status in living.items()
            if peer not in self.contributions
            and peer not in self._absent
            and status.state
            and (status.state == self.state.digest or status.round < self.state.round)
        )

    def left_out(self, living: Mapping[str, RunStatus]) -> list[str]:
        """Returns the peers that the last round was closed without, and that have not contributed since."""
        return sorted(peer for peer in self._absent if peer in living and peer not in self.contributions)

    def is_due(self, living: Mapping[str, RunStatus]) -> bool:
        """Returns whether the round can be closed: all living peers have contributed, or the deadline is over."""
        usable = self._usable(living)
        is_complete = bool(usable) and not self.late(living) and not self.missing(usable.values())
        return is_complete or self._is_over

    def due(self, living: Mapping[str, RunStatus]) -> dict[str, Contribution]:
        """Returns the contributions with which this peer proposes to close the round now; empty if it does not."""
        here = {peer: one for peer, one in self._usable(living).items() if one.blob in self._updates}
        return here if self.is_due(living) else {}

    def gives_way(self, steps: int) -> bool:
        """Returns whether a peer that still trains contributes now what it has, since another one has.

        Not at once, so that no peer can make rounds too short to be of use.
        """
        if self.closing_s <= 0 or steps == 0:
            return False
        is_enough = steps >= _MIN_STEPS_PART * self._config.steps_per_round
        return is_enough or self.closing_s > _PATIENCE_PART * self._config.straggler_s

    def after(self, record: RoundRecord) -> SharedState:
        """Returns the state after this round, closed by a record whose updates are all here."""
        found = [(self._updates[one.blob], one.samples) for one in record.contributions]
        updates = [(update, samples) for update, samples in found if update is not None]
        typical = self.state.typical[self.state.round % 2]
        mean, typical = combine(updates, max_norm_ratio=self._config.max_norm_ratio, typical=typical)
        return outer_step(
            self.state,
            mean,
            samples=sum(samples for _, samples in updates),
            lr=self._config.outer_lr,
            momentum=self._config.outer_momentum,
            typical=typical,
        )
