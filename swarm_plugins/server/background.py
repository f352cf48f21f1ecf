"""Long work and tidying up next to a server's event loop."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVar

from swarm_plugins.server.service import ExpertsService, Service

log = logging.getLogger(__name__)

T = TypeVar("T")

_SWEEP_EVERY_S = 10.0
_SWEEPS_PER_SUMMARY = 60
_IDLE_LOAD = 0.02
"""A server less busy than this has time to tidy up."""


async def in_thread(function: Callable[[], T]) -> T:
    """Runs a long function in a daemon thread: the process can end in the middle of it."""
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


def kept_going(work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
    """Starts a task that runs as long as the server; its failure is a fault of ours, and logged."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%r has failed, and stays undone until the server is started again", name, exc_info=error)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task


async def sweep(service: Service | ExpertsService) -> None:
    """Drops expired graphs, saves points, and returns freed memory to the system after busy periods."""
    was_busy = False
    for number in itertools.count(1):
        await asyncio.sleep(_SWEEP_EVERY_S)
        if number % _SWEEPS_PER_SUMMARY == 0:
            log.info("points: %s", service.points.summary())
        if isinstance(service, Service):
            service.activations.drop_expired()
        await in_thread(service.points.save)
        is_busy = service.scheduler.load > _IDLE_LOAD
        if was_busy and not is_busy:
            await in_thread(return_free_memory)
        was_busy = is_busy


def return_free_memory() -> None:
    """Asks the C library to return freed memory to the system, where it can.

    After large batches glibc keeps the freed memory for the next ones: a server that has been idle for a while would
    look several times larger than it is.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
