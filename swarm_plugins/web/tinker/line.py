"""The requests of one model in the order of their numbers, whatever the order in which they arrive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from swarm_plugins.errors import ConfigError

_GAP_S = 120.0
"""How long a request waits for one before it that has not arrived: its client tries again for minutes."""


class GapError(ConfigError):
    """A request before this one has not arrived."""


class Line:
    """Lets requests in one at a time, by their numbers from 1.

    Args:
        gap_s: Seconds that a request waits while nothing moves.
    """

    def __init__(self, *, gap_s: float = _GAP_S) -> None:
        self._gap_s = gap_s
        self._next = 1
        self._is_held = False
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Waits for the turn of a number, and holds it while the ``with`` block runs.

        Raises:
            ConfigError: If the number has had its turn.
            GapError: If a number before it does not come.
        """
        if number < self._next or number in self._waiting:
            raise ConfigError(f"seq_id {number} was used before: the next one is {self._next}")
        if number != self._next or self._is_held:
            await self._wait(number)
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self._next = number + 1
            self._pass_on()

    async def _wait(self, number: int) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            while not future.done():
                before = (self._next, self._is_held)
                await asyncio.wait([future], timeout=self._gap_s)
                is_stuck = before == (self._next, self._is_held) and not self._is_held
                if is_stuck and not future.done() and number == min(self._waiting):
                    missing, self._next = self._next, number + 1
                    raise GapError(f"request {missing} did not arrive within {self._gap_s:g} s, so {number} cannot run")
        finally:
            del self._waiting[number]
            if not future.done() or future.cancelled():
                self._pass_on()

    def _pass_on(self) -> None:
        future = self._waiting.get(self._next)
        if future is not None and not future.done() and not self._is_held:
            future.set_result(None)
