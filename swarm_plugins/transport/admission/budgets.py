"""How often peers may call: each peer, all peers of one address or network, and all together."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from swarm_plugins.recent import Recent
from swarm_plugins.transport.admission.addresses import Origin

_MAX_CALLERS = 4096
_CALL_BYTES = 64 << 10
"""Of an answer that takes as much work as a call."""


class Bucket:
    """A token bucket: holds a burst, and fills up again by so much a second.

    Args:
        burst: What may be taken at once.
        per_s: What comes back in a second.
        clock: Monotonic seconds; tests pass their own.
    """

    def __init__(self, burst: float, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._per_s = per_s
        self._clock = clock
        self._left = float(burst)
        self._since = clock()

    def charge(self, amount: float) -> None:
        """Takes an amount, which may leave a debt."""
        self._left = self.left - amount
        self._since = self._clock()

    @property
    def left(self) -> float:
        """What may be taken now; below 0, a debt."""
        return min(self._burst, self._left + (self._clock() - self._since) * self._per_s)

    @property
    def debt_s(self) -> float:
        """Seconds until there is no debt any more."""
        return max(0.0, -self.left / self._per_s)


class CallBudget:
    """A bucket of calls for each caller; arguments as for `Bucket`."""

    def __init__(self, burst: float, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_s = per_s
        self._full = functools.partial(Bucket, burst, per_s, clock)
        self._buckets: Recent[object, Bucket] = Recent(_MAX_CALLERS)

    def take(self, caller: object) -> bool:
        """Counts a call; returns whether the caller had one left."""
        found = self._buckets.get(caller)
        is_allowed = found is None or found.left >= 1
        if is_allowed:
            self.charge(caller, 1.0)
        return is_allowed

    def charge(self, caller: object, calls: float) -> None:
        """Counts work as so many calls, which may leave a debt."""
        bucket = self._buckets[caller] = self._buckets.get(caller) or self._full()
        bucket.charge(calls)


class CallBudgets:
    """Budgets of a peer, an address, a network and of all: identities cost nothing, so one for each is not enough.

    No address, and no network, can use up what is there for all.

    A server of this package makes some 4 calls a second to the nodes that keep its records, a client fewer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._of_peer = CallBudget(100, 10.0, clock)
        self._of_host = CallBudget(500, 50.0, clock)
        self._of_network = CallBudget(1000, 100.0, clock)
        self._of_all = CallBudget(2000, 250.0, clock)

    def refusal(self, peer: str, origin: Origin) -> str | None:
        """Counts a call; returns why it is refused, or None."""
        for budget, caller, whose in self._levels(peer, origin):
            if not budget.take(caller):
                return f"more than {budget.per_s:g} calls of the DHT a second {whose}"
        return None

    def charge(self, peer: str, origin: Origin, answer_bytes: int) -> None:
        """Counts an answer that has been made: a long one costs as much as several calls."""
        for budget, caller, _ in self._levels(peer, origin):
            budget.charge(caller, answer_bytes / _CALL_BYTES)

    def _levels(self, peer: str, origin: Origin) -> tuple[tuple[CallBudget, object, str], ...]:
        return (
            (self._of_peer, peer, "of one peer"),
            (self._of_host, origin.host, "of one address"),
            (self._of_network, origin.network, "of one network"),
            (self._of_all, None, "of all peers"),
        )
