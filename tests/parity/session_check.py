"""Waits until a swarm has closed its sessions and given back what requests held."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from swarm_plugins.testing.in_process import InProcessSwarm

CLOSE_S = 30.0


def sessions_left(swarm: InProcessSwarm, *, collect: bool = True) -> int:
    """Waits a bounded time until no session is open, and returns how many are.

    Args:
        swarm: The swarm.
        collect: Whether caches in reference cycles are collected first.
    """
    return _last(lambda: swarm.num_sessions, collect=collect)


def bytes_left(swarm: InProcessSwarm) -> int:
    """Waits a bounded time until no request holds memory of a server, and returns how many bytes are held.

    A request that its client has given up is computed to its end.
    """
    return _last(lambda: sum(service.ledger.used for service in swarm.services.values()))


def _last(count: Callable[[], int], *, collect: bool = True) -> int:
    if collect:
        gc.collect()
    deadline = time.monotonic() + CLOSE_S
    while count() and time.monotonic() < deadline:
        time.sleep(0.01)
    return count()
