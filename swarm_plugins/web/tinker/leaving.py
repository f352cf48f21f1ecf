"""Work in threads whose client may leave before it ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def finished(threads: Executor, work: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Computes in a thread, and returns the result.

    Who is cancelled meanwhile leaves when the thread has ended: a turn is held, and counted, as long as it is used.

    Args:
        threads: Where it is computed.
        work: Computes it.
        stop: Is set when the client leaves, so that long work can end early.
    """
    future = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        raise
