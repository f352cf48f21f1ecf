"""The record of one peer, what may happen with a peer, and the book: all is written by `PeerBook.observe`."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from swarm_plugins.book.backlog import Backlog
from swarm_plugins.book.rules import Rules
from swarm_plugins.recent import Recent
from swarm_plugins.transport.server_info import ServerInfo

_MAX_KINDS = 64
"""Kinds of checks and of receivers that are remembered of one peer: it can invent any number."""


class Sample(NamedTuple):
    """One answer."""

    blocks: int
    units: int
    seconds: float


@dataclass
class Work:
    """What was seen of one peer at one kind of work."""

    samples: deque[Sample]
    unit_s: float | None = None
    """Its pace, which rises at once and falls slowly. None: not known."""
    num_missed: int = 0
    """Deadlines missed since its last answer."""


class Rest(NamedTuple):
    """How long a peer is not asked to push to another one."""

    until: float
    length_s: float


class Checks(NamedTuple):
    """What checks of one kind of a peer's answers found."""

    num_passed: int = 0
    paused_until: float = -math.inf
    num_doubts: int = 0
    """Wrong answers, and answers that it refused to open."""


@dataclass
class PeerRecord:
    """All that a client knows of one peer; times are by the book's clock."""

    rules: Rules
    """How the peer is judged."""
    info: ServerInfo | None = None
    """Its last word about itself."""
    said_at: float = -math.inf
    step_s: float = 0.0
    """Announced seconds of the smallest request through all its blocks."""
    token_s: float = 0.0
    """Announced seconds of each token of a large one."""
    work: dict[str, Work] = field(default_factory=dict)
    num_calls: int = 0
    """Answers to requests that ran blocks."""
    answered_at: float = -math.inf
    ran_at: float = -math.inf
    """When it last ran blocks."""
    num_strikes: int = 0
    """Failures since it last did what it was asked."""
    failed_at: float = -math.inf
    failure: str = ""
    unkept: int = 0
    """Tokens of the smallest batch whose graph it has not kept; see `unkept_tokens`."""
    unkept_at: float = -math.inf
    rests: Recent[str, Rest] = field(default_factory=lambda: Recent(_MAX_KINDS))
    """By the peer that its outputs did not reach."""
    lag_s: float = 0.0
    """By how much a holder of experts was slower than it announces, ..."""
    lagged_at: float = -math.inf
    """... when it last answered."""
    checks: Recent[Hashable, Checks] = field(default_factory=lambda: Recent(_MAX_KINDS))
    backlog: Backlog = field(default_factory=Backlog)
    """This client's requests that are under way there."""
    remarks: set[str] = field(default_factory=set)
    """What has been logged of it, once."""
    is_packed: bool | None = None
    """Whether large tensors are packed for it. None: not decided."""

    def at(self, work: str) -> Work:
        """Returns what was seen of it at one kind of work, which is kept from now on."""
        found = self.work.get(work)
        if found is None:
            found = self.work[work] = Work(deque(maxlen=self.rules.kept_samples))
        return found


def lag_s(record: PeerRecord, now: float) -> float:
    """Returns by how many seconds a holder is believed to be slower than it announces: its lag fades with time."""
    return record.lag_s * 0.5 ** ((now - record.lagged_at) / record.rules.lag_half_life_s) if record.lag_s else 0.0


def unkept_tokens(record: PeerRecord, now: float) -> int:
    """Returns the tokens of the smallest batch whose graph it has not kept of late; 0: it keeps what it is asked to."""
    # Graphs of other clients may have taken the room, for a while.
    return record.unkept if now - record.unkept_at < record.rules.fade_s else 0


class Outcome(Protocol):
    """What has happened with a peer."""

    def write(self, record: PeerRecord, now: float) -> None:
        """Enters it in the peer's record."""


class Said(NamedTuple):
    """It has said what it serves."""

    info: ServerInfo

    def write(self, record: PeerRecord, now: float) -> None:
        """Keeps its word, and the speed that it announces."""
        num_blocks = self.info.end - self.info.start
        record.info, record.said_at = self.info, now
        record.step_s = self.info.decode_s * num_blocks
        record.token_s = num_blocks / self.info.throughput if self.info.throughput > 0 else 0.0


class Expected(NamedTuple):
    """It is known to take so many seconds for a step, and for each token of a batch."""

    step_s: float
    token_s: float

    def write(self, record: PeerRecord, now: float) -> None:
        """Keeps what it is expected to take, as if it had announced it."""
        record.step_s, record.token_s = self.step_s, self.token_s


class Overtaken(NamedTuple):
    """It had not answered when a replica had, after so many seconds."""

    work: str
    units: int
    seconds: float
    blocks: int

    def write(self, record: PeerRecord, now: float) -> None:
        """Counts the time as that of a request: it would have taken longer, and how much is not known."""
        record.at(self.work).samples.append(Sample(self.blocks, self.units, self.seconds))
        record.num_calls += self.blocks > 0
        record.answered_at = now
        if self.blocks:
            record.ran_at = now


class Answered(NamedTuple):
    """It has done some work; a refusal is none."""

    work: str
    units: int
    seconds: float
    blocks: int = 0
    """Blocks that ran; 0: the time does not count when servers are compared."""

    def write(self, record: PeerRecord, now: float) -> None:
        """Updates its pace."""
        work, unit_s = record.at(self.work), self.seconds / max(self.units, 1)
        known = work.unit_s or 0.0
        # Tokens of a large request are cheaper: the pace rises at once and falls slowly, so that the single token
        # after a long prefill still gets a fitting deadline.
        work.unit_s = unit_s if unit_s > known else known + record.rules.smoothing * (unit_s - known)
        work.num_missed = 0
        Overtaken(self.work, self.units, self.seconds, self.blocks).write(record, now)


class Missed(NamedTuple):
    """No answer came in time."""

    work: str

    def write(self, record: PeerRecord, now: float) -> None:
        """Gives it more time, if it proves to be alive."""
        record.at(self.work).num_missed += 1


class Failed(NamedTuple):
    """It failed."""

    reason: str

    def write(self, record: PeerRecord, now: float) -> None:
        """Bans it, each time twice as long."""
        record.num_strikes += 1
        record.failed_at, record.failure = now, self.reason


class Forgiven(NamedTuple):
    """Its answer was good."""

    def write(self, record: PeerRecord, now: float) -> None:
        """Forgets its failures."""
        record.num_strikes, record.failure = 0, ""


class Unkept(NamedTuple):
    """It has not kept the graph of a batch of so many tokens."""

    tokens: int

    def write(self, record: PeerRecord, now: float) -> None:
        """Keeps the smallest number."""
        record.unkept, record.unkept_at = min(self.tokens, unkept_tokens(record, now) or self.tokens), now


class Packed(NamedTuple):
    """Tensors for it are packed from now on, or not."""

    is_packed: bool

    def write(self, record: PeerRecord, now: float) -> None:
        """Keeps the decision: the parts of one call, a forward and its backward, travel alike."""
        record.is_packed = self.is_packed


class NotPushed(NamedTuple):
    """Its output did not reach another server."""

    receiver: str

    def write(self, record: PeerRecord, now: float) -> None:
        """Lets the two be for a while."""
        rules, known = record.rules, record.rests.get(self.receiver)
        length_s = rules.first_rest_s if known is None else min(2 * known.length_s, rules.max_rest_s)
        record.rests[self.receiver] = Rest(now + length_s, length_s)


class Lagged(NamedTuple):
    """It answered so many seconds later than expected; if sooner, the number is negative."""

    seconds: float

    def write(self, record: PeerRecord, now: float) -> None:
        """Updates by how much a holder of experts is slower than it announces."""
        known = lag_s(record, now)
        record.lag_s = max(known + self.seconds, known * record.rules.lag_recovery)
        record.lagged_at = now


class Checked(NamedTuple):
    """Its answers of one kind were checked: right, or not."""

    kind: Hashable
    is_right: bool
    is_doubt: bool = True
    """Whether a failed check counts against the server; a full queue does not."""

    def write(self, record: PeerRecord, now: float) -> None:
        """Counts passed checks. After a failed one all answers are checked again, after each doubt twice as many."""
        known = record.checks.pop(self.kind, Checks())
        num_passed, num_doubts = (
            (known.num_passed + 1, known.num_doubts) if self.is_right else (0, known.num_doubts + self.is_doubt)
        )
        is_forgiven = num_passed >= 2 * record.rules.most_first_checks
        record.checks[self.kind] = Checks(num_passed, num_doubts=0 if is_forgiven else num_doubts)


class Uncheckable(NamedTuple):
    """Its answers of one kind cannot be checked now."""

    kind: Hashable

    def write(self, record: PeerRecord, now: float) -> None:
        """Makes a pause."""
        known = record.checks.get(self.kind, Checks())
        record.checks[self.kind] = known._replace(paused_until=now + record.rules.uncheckable_s)


class PeerBook:
    """Holds one record per peer; those not written to for longest are forgotten when there are too many.

    Args:
        rules: How peers are judged.
        clock: Monotonic seconds.
    """

    def __init__(self, rules: Rules | None = None, *, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self.rules = rules or Rules()
        self._clock = clock
        self._records: Recent[str, PeerRecord] = Recent()

    @property
    def now(self) -> float:
        """The time by which records are read."""
        return self._clock()

    def __getitem__(self, peer: str) -> PeerRecord:
        """Returns the record of a peer; a blank one, which is not kept, if nothing is known."""
        return self._records.get(peer) or PeerRecord(self.rules)

    def kept(self, peer: str) -> PeerRecord:
        """Returns the record of a peer, which is kept from now on."""
        record = self._records.get(peer)
        if record is None:
            record = self._records[peer] = PeerRecord(self.rules)
        return record

    def records(self) -> dict[str, PeerRecord]:
        """Returns all records; other threads may call it."""
        while True:
            # The garbage collector may let the loop's thread in.
            with contextlib.suppress(RuntimeError):
                return dict(self._records.items())

    def is_news(self, peer: str, remark: str) -> bool:
        """Returns whether a remark on a peer was not made before; from now on it was."""
        remarks = self.kept(peer).remarks
        is_news = remark not in remarks
        remarks.add(remark)
        return is_news

    def observe(self, peer: str, outcome: Outcome) -> None:
        """Records what has happened with a peer."""
        record = self.kept(peer)
        self._records.move_to_end(peer)
        outcome.write(record, self.now)
