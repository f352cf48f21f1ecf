"""Start-time fair queueing (Goyal, Vin and Cheng 1996): turns go by how much each has had, not by how often it asks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from swarm_plugins.recent import Recent


class Clocks:
    """How much each of some names has had. Whoever comes (back) starts at the present, so idle time earns nothing.

    The clocks used longest ago are forgotten when there are very many; such a name starts at the present, too.
    """

    def __init__(self) -> None:
        self._at = Recent[str, float]()
        self._present = 0.0

    def start(self, name: str) -> float:
        """Returns when the next piece of work of a name would start; the least goes first."""
        return max(self._at.get(name, 0.0), self._present)

    def advance(self, name: str, amount: float) -> None:
        """Notes that a name has had so much."""
        self._present = self.start(name)
        self._at[name] = self._present + amount


class FairLock:
    """Lets one in at a time: of those who wait, the name that has held it for the shortest time. For one event loop.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._clocks = Clocks()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._is_held = False

    @contextlib.asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Waits for a turn of ``name``, and holds the lock while the ``with`` block runs."""
        if self._is_held:
            await self._wait(name)
        self._is_held = True
        began = self._clock()
        try:
            yield
        finally:
            self._clocks.advance(name, self._clock() - began)
            self._pass_on()

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
        """Hands the lock to the next one that waits. It is never free in between, so no newcomer can slip in."""
        while self._waiting:
            name = min(self._waiting, key=self._clocks.start)
            future = self._waiting[name].popleft()
            if not self._waiting[name]:
                del self._waiting[name]
            if not future.done():
                future.set_result(None)
                return
        self._is_held = False
