"""Work in threads: how long that of several clients is gathered, what each of them gets, and who leaves meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")
GATHER_S = 0.02
"""What clients ask for at once arrives within milliseconds."""


async def finished(threads: Executor, work: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Computes in a thread, and returns the result.

    Who is cancelled meanwhile leaves when the thread has ended: a turn is held, and counted, as long as it is used.

    Args:
        threads: Where it is computed.
        work: Computes it.
        stop: Set if nobody waits for the result any more, for work that takes long.
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


async def compute_for(
    clients: Sequence[asyncio.Future[T]], threads: Executor, work: Callable[[], Sequence[T | Exception]]
) -> None:
    """Computes in a thread, and gives each client its result; what ``work`` raises is an answer to all of them."""
    found: Sequence[T | Exception]
    try:
        found = await asyncio.get_running_loop().run_in_executor(threads, work)
    except Exception as exc:  # noqa: BLE001 - an answer
        found = [exc] * len(clients)
    except BaseException:  # at the end of the API
        for one in clients:
            one.cancel()
        raise
    for one, result in zip(clients, found, strict=True):
        if one.done():
            continue  # this client has left meanwhile
        if isinstance(result, Exception):
            one.set_exception(result)
        else:
            one.set_result(result)
