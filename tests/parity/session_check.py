"""Waits until a swarm has closed its sessions."""

from __future__ import annotations

import gc
import time

from swarm_plugins.testing.in_process import InProcessSwarm

CLOSE_S = 30.0


def sessions_left(swarm: InProcessSwarm) -> int:
    """Waits a bounded time until no session is open, and returns how many are."""
    gc.collect()
    deadline = time.monotonic() + CLOSE_S
    while swarm.num_sessions and time.monotonic() < deadline:
        time.sleep(0.01)
    return swarm.num_sessions
