"""Asks many servers at once what they serve, without waiting long for those that hang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Hashable, Mapping
from typing import Any

_GRACE_S = 0.25
_GRACE_FACTOR = 3.0
"""Once all is covered, others have this long, and this many times the time it took, to answer too."""


class Probes:
    """Runs at most one probe of each peer.

    Args:
        probe: Asks a peer and notes its answer; returns whether there was one. It has a deadline.
    """

    def __init__(self, probe: Callable[[str], Coroutine[Any, Any, bool]]) -> None:
        self._probe = probe
        self._running: dict[str, asyncio.Task[bool]] = {}

    async def ask(self, shares: Mapping[str, Collection[Hashable]], *, longest_s: float) -> set[str]:
        """Probes peers and returns those that have answered; probes of late ones go on.

        Returns early when the answers cover all shares.

        Args:
            shares: What each peer is believed to have, such as its blocks.
            longest_s: Longest wait.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        until = started + longest_s
        tasks = {self._task(peer): peer for peer in shares}
        answered: set[str] = set()
        missing = {part for share in shares.values() for part in share}
        pending = set(tasks)
        while pending and (left_s := until - loop.time()) > 0:
            done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.result():
                    answered.add(tasks[task])
                    was_covered = not missing
                    missing.difference_update(shares[tasks[task]])
                    if not missing and not was_covered:
                        took_s = loop.time() - started
                        until = min(until, loop.time() + max(_GRACE_S, _GRACE_FACTOR * took_s))
        return answered

    def _task(self, peer: str) -> asyncio.Task[bool]:
        if peer not in self._running:
            task = self._running[peer] = asyncio.create_task(self._probe(peer), name=f"ask {peer} what it serves")
            task.add_done_callback(lambda _: self._running.pop(peer, None))
        return self._running[peer]
