"""Waiting of one task for the bytes of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Waiter:
    """Lets one task wait until it is woken or a time is up."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the task waits now."""
        return self._future is not None

    async def wait(self, timeout_s: float, on_timeout: Callable[[], None]) -> None:
        """Waits; after ``timeout_s`` calls ``on_timeout``, which should wake it."""
        loop = asyncio.get_running_loop()
        self._future = loop.create_future()
        # Cheaper than asyncio.timeout, which costs more than the rest of a small message.
        timer = loop.call_later(timeout_s, on_timeout)
        try:
            await self._future
        finally:
            timer.cancel()
            self._future = None

    def wake(self, error: Exception | None = None) -> None:
        """Ends the wait, if there is one, with an error if one is given."""
        if self._future is None or self._future.done():
            return
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)
