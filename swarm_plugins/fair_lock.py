"""A lock whose waiters take turns by the time for which they have held it, not by how often they ask."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from swarm_plugins.recent import Recent


class FairLock:
    """Lets one in at a time: of those who wait, the name that has held it for the shortest time. For one event loop.

    Start-time fair queueing (Goyal, Vin and Cheng 1996): whoever comes, or comes back, starts at the present, so that
    idle time earns nothing.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held_s = Recent[str, float]()
        self._present_s = 0.0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._is_held = False

    @contextlib.asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Waits for a turn of ``name``, and holds the lock while the ``with`` block runs."""
        if self._is_held:
            await self._wait(name)
        self._is_held = True
        self._present_s = start = self._start(name)
        began = self._clock()
        try:
            yield
        finally:
            self._held_s[name] = start + self._clock() - began
            self._pass_on()

    def _start(self, name: str) -> float:
        return max(self._held_s.get(name, 0.0), self._present_s)

    async def _wait(self, name: str) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._pass_on()  # its turn had come
            raise

    def _pass_on(self) -> None:
        """Gives the lock to the next one; it stays held meanwhile, so that nobody comes in between."""
        while self._waiting:
            name = min(self._waiting, key=self._start)
            future = self._waiting[name].popleft()
            if not self._waiting[name]:
                del self._waiting[name]
            if not future.done():
                future.set_result(None)
                return
        self._is_held = False
