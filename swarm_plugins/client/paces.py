"""How fast servers proved to be in this client's own requests, which counts more than what they announce."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from swarm_plugins.recent import Recent
from swarm_plugins.routing.chain import ServerEntry

_MIN_CALLS = 3
"""Own requests after which a server's announced figures no longer count."""
_KEPT = 32
"""Requests of each kind that are remembered."""
_RECENT = 8
"""Requests whose median is a server's pace."""
_STEP_TOKENS = 16
"""A request of at most so many tokens is a step: its time hardly depends on their number."""
_CLAMP = 0.25
"""A server is believed to need this share of the time of the fastest one seen, not less."""
_BUSIEST = 0.9
"""Announced loads above this count as this."""
_FRESH_S = 60.0
_FADE_S = 600.0
"""What was seen longer ago than `_FRESH_S` loses half its weight in this time: a busy server gets another chance."""
_MIN_ALIKE = 8
"""Requests of about the same size that make a distribution."""
_CHECK_STEPS = 4
_CLEARLY = 2.0
_NOISE_S = 0.01
"""A session moves to a server that is faster by this factor and more."""
_MOVE_S = 0.2
"""Time of a move that does not depend on its length."""
_COMPUTING = ("rpc_forward", "rpc_session")
"""Requests by which servers are compared."""
_LEAST_S = 1e-9


class _Sample(NamedTuple):
    blocks: int
    tokens: int
    seconds: float


class _Pace(NamedTuple):
    """Seconds of one block for a step, and for each token of a batch. None: not known."""

    step_s: float | None
    token_s: float | None


class StepTimes:
    """The decode steps of a session on one server, and whether another server would be clearly faster."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_KEPT)
        self._left = _CHECK_STEPS

    def add(self, seconds: float) -> bool:
        """Records a step; returns whether it is time to compare."""
        self._recent.append(seconds)
        self._left -= 1
        if self._left > 0:
            return False
        self._left = _CHECK_STEPS
        return True

    def is_move_worth(self, step_s: float, replay_s: float) -> bool:
        """Returns whether the rest of a session should move.

        It should once the steps have taken longer, by as much as a replay would take, than they would have elsewhere:
        then no other rule is always better by more than a factor of two, however long the session lasts.

        Args:
            step_s: Seconds of a step elsewhere.
            replay_s: Seconds of the replay there.
        """
        now_s = median(list(self._recent)[-_CHECK_STEPS:])
        lost_s = sum(max(seconds - step_s, 0.0) for seconds in self._recent)
        return now_s > _CLEARLY * step_s + _NOISE_S and lost_s > replay_s + _MOVE_S

    def postpone(self) -> None:
        """Waits longer before the next comparison, because a move has failed."""
        self._left = _KEPT


@dataclass
class _Seen:
    """What was seen of one server."""

    samples: dict[str, deque[_Sample]] = field(default_factory=dict)
    """By rpc."""
    num_calls: int = 0
    unkept_tokens: int = 0
    """Tokens of the smallest batch of which it has not kept the graph; 0: it keeps what it is asked to."""
    at: float = 0.0


class Paces:
    """Remembers how long servers took.

    Args:
        clock: Monotonic seconds; tests pass their own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: Recent[str, _Seen] = Recent()

    def observe(self, peer: str, rpc: str, *, blocks: int, tokens: int, seconds: float) -> None:
        """Records how long a server took for so many tokens through so many blocks; 0 blocks: for nothing."""
        seen = self._seen[peer] = self._seen.get(peer) or _Seen()
        seen.samples.setdefault(rpc, deque(maxlen=_KEPT)).append(_Sample(blocks, tokens, seconds))
        seen.num_calls += blocks > 0
        seen.at = self._clock()

    def round_trip_s(self, peer: str) -> float | None:
        """Returns how long a server took lately to say what it serves, without opening a stream; None: not known."""
        samples = list(self._seen[peer].samples.get("rpc_info", ())) if peer in self._seen else []
        return median(one.seconds for one in samples[-_MIN_CALLS:]) if samples else None

    def unkept(self, peer: str, tokens: int) -> None:
        """Notes that a server has not kept the graph of a batch for its backward."""
        seen = self._seen.setdefault(peer, _Seen())
        seen.unkept_tokens = min(tokens, seen.unkept_tokens or tokens)

    def unkept_tokens(self, peers: Iterable[str]) -> int:
        """Returns the tokens of a batch of which one of some servers has not kept the graph; 0 if each does."""
        found = (self._seen[peer].unkept_tokens for peer in peers if peer in self._seen)
        return min((tokens for tokens in found if tokens), default=0)

    def is_known(self, peer: str) -> bool:
        """Returns whether a server has run so many batches that their times say how to cut the next ones."""
        samples = self._seen[peer].samples.get("rpc_forward", ()) if peer in self._seen else ()
        return sum(one.tokens > _STEP_TOKENS for one in samples) >= _MIN_ALIKE

    def usual_s(self, peer: str, rpc: str, *, blocks: int, tokens: int) -> float | None:
        """Returns the 95th percentile of a server's requests of about this size; None if too few are known."""
        samples = self._seen[peer].samples.get(rpc, ()) if peer in self._seen else ()
        alike = sorted(
            one.seconds for one in samples if one.blocks == blocks and tokens <= 2 * one.tokens <= 4 * tokens
        )
        return alike[math.ceil(0.95 * len(alike)) - 1] if len(alike) >= _MIN_ALIKE else None

    def corrected(self, entries: Sequence[ServerEntry], loads: Mapping[str, float]) -> list[ServerEntry]:
        """Returns servers with figures to be believed.

        These are the announced ones, slowed by the announced load and clamped by what the fastest server showed, for
        servers asked fewer than `_MIN_CALLS` times; for others, the observed ones.

        Args:
            entries: Servers with measured round trips and announced figures.
            loads: Announced share of time in which each is busy.
        """
        own = {entry.peer: self._own(entry) for entry in entries}
        least_step_s = _CLAMP * min(_known(pace.step_s for pace in own.values()), default=0.0)
        least_token_s = _CLAMP * min(_known(pace.token_s for pace in own.values()), default=0.0)
        result = []
        for entry in entries:
            slower = 1.0 / (1.0 - min(max(loads.get(entry.peer, 0.0), 0.0), _BUSIEST))
            announced_s = 1.0 / entry.throughput if entry.throughput > 0 else 0.0
            step_s = max(entry.step_s * slower, least_step_s)
            token_s = max(announced_s * slower, least_token_s)
            pace = own[entry.peer]
            if pace != _UNKNOWN:
                # What was not observed is as much slower than announced as what was.
                lags = [seen / said for seen, said in zip(pace, (step_s, token_s), strict=True) if seen and said]
                lag = max(lags, default=1.0)
                weight = self._weight(entry.peer)
                step_s = _mixed(pace.step_s, step_s, lag, weight)
                token_s = _mixed(pace.token_s, token_s, lag, weight)
            result.append(replace(entry, step_s=step_s, throughput=1.0 / token_s if token_s > 0 else 0.0))
        return result

    def _own(self, entry: ServerEntry) -> _Pace:
        seen = self._seen.get(entry.peer)
        if seen is None or seen.num_calls < _MIN_CALLS:
            return _UNKNOWN
        steps: list[float] = []
        tokens: list[float] = []
        for rpc in _COMPUTING:
            for one in list(seen.samples.get(rpc, ()))[-_RECENT:]:
                block_s = max(one.seconds - entry.round_trip_s, _LEAST_S) / max(one.blocks, 1)
                if one.tokens <= _STEP_TOKENS:
                    steps.append(block_s)
                else:
                    tokens.append(block_s / one.tokens)
        return _Pace(*(median(values) if values else None for values in (steps, tokens)))

    def _weight(self, peer: str) -> float:
        age_s = self._clock() - self._seen[peer].at
        return float(0.5 ** (max(age_s - _FRESH_S, 0.0) / _FADE_S))


_UNKNOWN = _Pace(None, None)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mixed(seen: float | None, announced: float, lag: float, weight: float) -> float:
    """Returns the observed figure, or as it ages, one between it and the announced one."""
    value = announced * lag if seen is None else seen
    return float(value**weight * announced ** (1.0 - weight)) if announced > 0 else value
