"""Runs asyncio code in a thread of its own: the client's, for which ordinary PyTorch code waits, and the DHT's."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from swarm_plugins.errors import SwarmError, TransportError

log = logging.getLogger(__name__)

T = TypeVar("T")
_END_S = 5.0
_LEAVE_S = 2.0
"""Time for tasks to clean up when they are interrupted, or the loop ends."""


class LoopThread:
    """An event loop in a daemon thread; using it after `close` raises TransportError.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str = "swarm-client") -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = 0
        """Id of the process that has the thread: those forked from it have none."""
        self._lock = threading.RLock()
        self._awaited: dict[Future[Any], asyncio.AbstractEventLoop] = {}
        """What threads wait for: when its loop ends, none of them waits any longer."""

    def start(self) -> None:
        """Starts the thread, also after `close`. Idempotent."""
        if self._thread is not None:
            return
        self._loop, self._process = asyncio.new_event_loop(), os.getpid()
        self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self._name, daemon=True)
        self._thread.start()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                # They close streams on their way out; threads waiting for them are released then.
                loop.run_until_complete(asyncio.wait(tasks, timeout=_LEAVE_S))
            # hivemind's cancelled calls leave their connections to the garbage collector.
            for transport in list(getattr(loop, "_transports", {}).values()):
                transport.abort()
            loop.run_until_complete(loop.shutdown_asyncgens())
            with self._lock:
                # Tasks that take longer, and what was submitted meanwhile.
                for future, its in list(self._awaited.items()):
                    if its is loop:
                        future.cancel()
                loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the loop."""
        if self._is_in_parent:
            coroutine.close()
            raise TransportError(
                "this process was forked from one that had joined the swarm, whose thread for the network it lacks: "
                "load the model in the child process, or start it with the method 'spawn' of multiprocessing"
            )
        with self._lock:
            if self._loop is None or self._loop.is_closed():
                coroutine.close()
                raise TransportError("the connection to the swarm is closed; load the model again to open a new one")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._awaited[future] = self._loop
        future.add_done_callback(self._awaited.pop)
        return future

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine (which has its own deadlines) and returns its result; Ctrl-C cancels it."""
        ended = threading.Event()
        telling = _telling(coroutine, ended)
        try:
            future = self.submit(telling)
        except TransportError:
            coroutine.close()
            raise
        try:
            return future.result()
        except SwarmError as exc:
            # Its message says what failed and what to do; frames and causes inside the network code would bury it.
            log.debug("failed on the loop", exc_info=exc)
            raise exc.with_traceback(None) from None
        except BaseException:
            future.cancel()
            # What it takes back on its way out, such as the tokens of a step, must not meet the next call.
            ended.wait(_LEAVE_S)
            raise

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Runs a callback on the loop if it is still running; safe to call from a garbage collector."""
        loop = self._loop
        if loop is not None and not loop.is_closed() and not self._is_in_parent:
            loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """Stops the loop and waits for the thread. Idempotent."""
        thread = self._stop()
        if thread is not None:
            thread.join(timeout=_END_S)

    async def aclose(self) -> None:
        """Like `close`, for callers on another loop, which goes on meanwhile; also while the interpreter ends."""
        thread = self._stop()
        until = time.monotonic() + _END_S
        # An executor that could join the thread takes no more work when the interpreter ends.
        while thread is not None and thread.is_alive() and time.monotonic() < until:
            await asyncio.sleep(0.005)

    @property
    def _is_in_parent(self) -> bool:
        return self._thread is not None and self._process != os.getpid()

    def _stop(self) -> threading.Thread | None:
        thread, self._thread = self._thread, None
        if self._loop is not None and thread is not None and thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
        return thread


async def _telling(coroutine: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await coroutine
    finally:
        ended.set()
