"""How busy the compute thread is, and when to wait a moment so that more sessions share a forward.

Sessions that decode come back a short time after each answer. If a forward starts with those that wait, those that
are about to come form a second group, and the two groups alternate: each round costs two forwards. A forward costs
``a + b * rows``; waiting ``w`` for the others replaces two forwards by one, which is less work and a shorter round for
all of them whenever ``w < a``. That is the rule, with ``a`` and each session's return time learnt here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swarm_plugins.recent import Recent

_MAX_SESSIONS = 1024
_MAX_GAP_S = 1.0
"""Sessions that take longer to come back are not waited for."""
_OLD_RUNS = 4096
"""Sizes of packs of which none has run for so many runs are forgotten: the machine may have become faster or slower."""
_NEW = 1 / 16
"""Part that a longer run has in what is known of its size."""
_CAUTION = 0.7
"""Part of ``a`` that a wait may take: return times vary."""
_MIN_FREE_ROWS = 1.0
_FREE_ROWS_AT_FIRST = 4.0
_MARGIN = 1.25
_MIN_MARGIN_S = 0.001
_WINDOW_S = 10.0
"""Time constant of the average load."""
_STUCK_S = 4.0
_STUCK_FACTOR = 4.0
"""A piece of work hangs if it takes longer than this, and so many times as long as the longest recent one and as one of
its size should take."""
_MAX_PIECES = 64
_MIN_PIECE_S = 0.05
"""Shorter pieces of work tell nothing about how long one may take."""


@dataclass(slots=True)
class _Size:
    """Forwards of about the same number of rows: the least time of late, with its rows.

    Not the average: a peer with long contexts would make a forward itself look dear, and its many rows cheap.
    """

    rows: float
    seconds: float
    last_run: int = 0

    def add(self, rows: int, seconds: float, run: int) -> None:
        part = 1.0 if seconds < self.seconds else _NEW
        self.rows += (rows - self.rows) * part
        self.seconds += (seconds - self.seconds) * part
        self.last_run = run


@dataclass(slots=True)
class _Session:
    answered: float = 0.0
    gap_s: float | None = None
    is_running: bool = True


class Rhythm:
    """Learns how long forwards over some blocks take and when sessions come back. Used by one thread."""

    def __init__(self) -> None:
        self._sessions: Recent[Hashable, _Session] = Recent(_MAX_SESSIONS)
        self._sizes = dict[int, _Size]()
        """By the number of binary digits of the rows: a peer that keeps to one size does not hide the others."""
        self._num_runs = 0
        self._fixed_s = 0.0
        """``a``, the fixed cost of a forward."""
        self.free_rows = _FREE_ROWS_AT_FIRST
        """Rows of single tokens that cost as much as the forward itself, ``a / b``, as far as is known."""

    def arrived(self, session: Hashable, now: float) -> None:
        """Notes that a session has sent its next step."""
        known = self._sessions[session] = self._sessions.get(session) or _Session()
        if not known.is_running:
            gap_s = max(0.0, now - known.answered)
            known.gap_s = gap_s if known.gap_s is None else (known.gap_s + gap_s) / 2
        known.is_running = True

    def answered(self, session: Hashable, now: float) -> None:
        """Notes that a session has got its answer."""
        known = self._sessions.get(session)
        if known is not None:
            known.answered = now
            known.is_running = False

    def ran(self, rows: int, seconds: float) -> None:
        """Notes how long a forward of single-token steps took."""
        self._num_runs += 1
        known = self._sizes.setdefault(rows.bit_length(), _Size(rows, seconds))
        known.add(rows, seconds, self._num_runs)
        self._sizes = {key: one for key, one in self._sizes.items() if self._num_runs - one.last_run < _OLD_RUNS}
        sizes = sorted(self._sizes.values(), key=lambda one: one.rows)
        if len(sizes) == 1:
            # Half the time is a careful guess for small packs. The free rows stay: a peer may keep to one size.
            self._fixed_s = sizes[0].seconds / 2 if rows <= 4 else 0.0
            return
        slope = _slope(sizes)
        self._fixed_s = max(sizes[0].seconds - slope * sizes[0].rows, 0.0)
        self.free_rows = max(_MIN_FREE_ROWS, self._fixed_s / slope) if slope else math.inf

    def wait_s(self, waiting: Collection[Hashable], now: float) -> float:
        """Returns how long to wait for sessions that are about to come; 0 if it does not pay."""
        due = [
            session.answered + session.gap_s * _MARGIN + _MIN_MARGIN_S - now
            for name, session in self._sessions.items()
            if not session.is_running and session.gap_s is not None and session.gap_s <= _MAX_GAP_S
            if name not in waiting
        ]
        # An overdue session has ended, or pauses: not waited for.
        due = [due_s for due_s in due if due_s > 0]
        if not due:
            return 0.0
        limit_s = _CAUTION * self._fixed_s
        return max((due_s for due_s in due if due_s < limit_s), default=0.0)


def _slope(sizes: Sequence[_Size]) -> float:
    """Returns seconds of a further row, 0 or more: from the smallest pack to the first that takes twice as long.

    Larger packs do not tell how many rows are free beside one, and would outweigh those that do.
    """
    first, *larger = sizes
    other = next((one for one in larger if one.seconds >= 2 * first.seconds), larger[-1])
    return max(0.0, (other.seconds - first.seconds) / (other.rows - first.rows))


class _Busy(NamedTuple):
    """The state since the last change."""

    since: float
    share: float
    is_busy: bool
    seconds: float
    work: int


class BusyMeter:
    """Averages busy (1) and idle (0) time exponentially, recent seconds most.

    One thread calls ``begin`` for each piece of work, and ``end`` when there is no more; any thread may read.
    """

    def __init__(self) -> None:
        # One tuple, replaced as a whole: a reader in another thread never sees half an update.
        self._state: _Busy | None = None
        self._pieces: deque[float] = deque(maxlen=_MAX_PIECES)
        self._longest_s = 0.0

    @property
    def work(self) -> int:
        """Size of the piece of work that is running, in tokens times blocks; 0 if unknown."""
        return 0 if self._state is None else self._state.work

    def begin(self, now: float, work: int = 0) -> None:
        """Notes that a piece of work begins, of at most so many tokens times blocks; the one before it has ended."""
        self._change(now, work, is_busy=True)

    def end(self, now: float) -> None:
        """Notes that work ends."""
        self._change(now, 0, is_busy=False)

    def _change(self, now: float, work: int, *, is_busy: bool) -> None:
        state = self._state
        if state is not None and state.is_busy and now - state.since > _MIN_PIECE_S:
            self._pieces.append(now - state.since)
            self._longest_s = max(self._pieces)
        self._state = _Busy(now, self.share(now), is_busy, self.seconds(now), work)

    def is_stuck(self, now: float, step_s: float, token_s: float) -> bool:
        """Returns whether a piece of work takes far longer than the last ones did, and than one of its size should.

        Args:
            now: The time.
            step_s: What a piece of one token takes.
            token_s: What each token of a large piece takes in a block.
        """
        state = self._state
        if state is None or not state.is_busy:
            return False
        usual_s = max(self._longest_s, step_s + token_s * state.work)
        return now - state.since > max(_STUCK_S, _STUCK_FACTOR * usual_s)

    def share(self, now: float) -> float:
        """Returns the average at time ``now``, between 0 and 1."""
        if self._state is None:
            return 0.0
        since, share, is_busy, *_ = self._state
        goal = 1.0 if is_busy else 0.0
        return goal + (share - goal) * math.exp(-max(0.0, now - since) / _WINDOW_S)

    def seconds(self, now: float) -> float:
        """Returns how long work has taken in all, until ``now``."""
        if self._state is None:
            return 0.0
        since, _, is_busy, before, _ = self._state
        return before + (max(0.0, now - since) if is_busy else 0.0)
