"""Work of several clients that is computed together: how long it is gathered, and what each client gets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")
GATHER_S = 0.02
"""What clients ask for at once arrives within milliseconds."""


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
