"""Work for the compute thread that someone on an event loop awaits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.server.compute.pack import PartialStep
from swarm_plugins.server.failures import RequestError

__all__ = ["Call", "Step", "Work"]

log = logging.getLogger(__name__)


class Work:
    """Work that someone on an event loop awaits.

    Args:
        peer: Who asks for it; empty for the server itself.
    """

    __slots__ = ("abandoned", "future", "loop", "peer")

    def __init__(self, peer: str = "") -> None:
        self.peer = peer
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.abandoned = False

    def finish(self, result: object = None, error: BaseException | None = None) -> None:
        """Hands the outcome to the event loop; called on the compute thread."""
        try:
            self.loop.call_soon_threadsafe(self._settle, result, error)
        except RuntimeError:  # the loop has been closed: nobody waits any more
            log.debug("a result came after the event loop was closed")

    def expire(self, timeout_s: float) -> None:
        """Ends the wait; called on the event loop."""
        text = f"no result within {timeout_s:g} s: this server is too busy, ask another one"
        self._settle(None, RequestError("overloaded", text))

    def _settle(self, result: object, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class Call(Work):
    """A function to run, urgent (cache operations) or not (training)."""

    __slots__ = ("function", "is_training")

    def __init__(self, function: Callable[[], Any], *, is_training: bool, peer: str = "") -> None:
        super().__init__(peer)
        self.function = function
        self.is_training = is_training


class Step(Work):
    """New tokens of one session."""

    __slots__ = ("arrived", "part", "prepare")

    def __init__(self, inputs: StepInputs, prepare: Callable[[], None] | None, peer: str = "") -> None:
        super().__init__(peer)
        self.arrived = time.monotonic()
        self.part = PartialStep(inputs)
        self.prepare = prepare
