"""Long work beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_thread"]

log = logging.getLogger(__name__)

T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """Runs a long function beside the event loop, in a daemon thread: leaving in the middle of a load is possible."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]  # T may be None
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as exc:  # noqa: BLE001 - raised where it is awaited
            error = exc
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            log.debug("the event loop was closed before a thread ended")

    threading.Thread(target=run, name="swarm-load", daemon=True).start()
    return await future
