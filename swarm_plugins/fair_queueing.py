"""Start-time fair queueing (Goyal, Vin and Cheng 1996): turns go by how much each has had, not by how often it asks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping

from swarm_plugins.recent import Recent


class Clocks:
    """How much each of some names has had. Who comes starts at the present, who comes back a credit earlier at most.

    The clocks used longest ago are forgotten when there are very many; such a name starts at the present, too.

    Args:
        credit: How much idle time earns at most. Who asks for less than its share then waits for one piece of
            others' work, not for as much as it has just had. None may have more than its share for longer than that.
    """

    def __init__(self, credit: float = 0.0) -> None:
        self._credit = credit
        self._at = Recent[str, float]()
        self._present = 0.0

    def start(self, name: str) -> float:
        """Returns when the next piece of work of a name would start; the least goes first."""
        at = self._at.get(name)
        return self._present if at is None else max(at, self._present - self._credit)

    def advance(self, name: str, amount: float) -> None:
        """Notes that a name has had so much."""
        start = self.start(name)
        self._present = max(self._present, start)
        self._at[name] = start + amount


class FairLock:
    """Lets one in at a time: of those who wait, the name that has held it for the shortest time. For one event loop.

    Args:
        clock: Monotonic seconds.
        places: How many it lets in side by side.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, places: int = 1) -> None:
        self._clock = clock
        self._free = places
        self._clocks = Clocks()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, name: str, shares: Mapping[str, float] | None = None) -> AsyncIterator[None]:
        """Waits for a turn of ``name``, and holds the lock while the ``with`` block runs.

        Args:
            name: Who waits.
            shares: Among whom the time is divided, looked at in the end: what each has had of it. None: all is
                ``name``'s.
        """
        if self._free:
            self._free -= 1
        else:
            await self._wait(name)
        began = self._clock()
        try:
            yield
        finally:
            held, parts = self._clock() - began, shares or {name: 1.0}
            for one, share in parts.items():
                self._clocks.advance(one, held * share / sum(parts.values()))
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
        self._free += 1
