"""Submits work to a server's compute thread and awaits its result; bounds what may wait."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from swarm_plugins.block_io import SpanOutputs
from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.errors import CapacityError
from swarm_plugins.ledger import Ledger
from swarm_plugins.offload.held import HeldExperts
from swarm_plugins.server.compute.thread import ComputeThread
from swarm_plugins.server.compute.work import LITTLE, Call, Load, OnChunk, Parts, Step, Work, log_outcome
from swarm_plugins.server.failures import RequestError
from swarm_plugins.server.hosted import HostedSpans
from swarm_plugins.server.state.points import Points

T = TypeVar("T")


class Scheduler:
    """Runs everything that touches the span, in one thread of its own; steps and their results are on the CPU.

    Args:
        runner: The span; what only holds experts, and takes no steps, will do too.
        points: How peers share the turns. None: alike, newcomers of one address together.
        chunk_tokens: Tokens in one packed forward of session steps; longer prefills are cut.
        max_waiting_steps: Session steps and cache operations that may wait; one peer takes half of them at most.
        max_waiting_trainings: Forward and backward requests that may wait; one peer takes half of them at most.
    """

    def __init__(
        self,
        runner: HostedSpans | HeldExperts,
        points: Points | None = None,
        *,
        chunk_tokens: int = 1024,
        max_waiting_steps: int = 256,
        max_waiting_trainings: int = 32,
    ) -> None:
        self.points = points or Points()
        self._thread = ComputeThread(runner, self.points, chunk_tokens)
        self._waiting_steps = Ledger(max_waiting_steps, noun="waiting steps", groups=self.points)
        self._waiting_trainings = Ledger(max_waiting_trainings, noun="waiting requests", groups=self.points)
        self.num_waiting = 0
        """Requests that have been submitted and not answered."""

    @property
    def packs(self) -> Counter[int]:
        """Forwards of session steps so far, by the number of steps that shared one."""
        return self._thread.packs

    @property
    def load(self) -> float:
        """Share of the last seconds in which the compute thread was busy, 0 to 1."""
        return self._thread.busy.share(time.monotonic())

    @property
    def busy_s(self) -> float:
        """Seconds that the compute thread has worked so far."""
        return self._thread.busy.seconds(time.monotonic())

    def is_stuck(self, step_s: float, token_s: float) -> bool:
        """Returns whether the compute thread hangs in its work, by what a step and a token in a block usually take."""
        return self._thread.busy.is_stuck(time.monotonic(), step_s, token_s)

    def start(self) -> None:
        """Starts the compute thread."""
        self._thread.start()

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Fails what waits, ends the thread after what it runs now. Idempotent."""
        self._thread.stop(timeout_s)

    async def call(
        self, function: Callable[[], T] | Parts[T], *, timeout_s: float, peer: str = "", load: Load = LITTLE
    ) -> T:
        """Runs a short function, such as a cache operation, before any waiting step; peers take turns.

        Raises:
            RequestError: ``overloaded`` if too much waits or ``timeout_s`` passes.
        """
        item = Call(function, is_training=False, peer=peer, load=load)
        result: T = await self._submit(item, self._waiting_steps, timeout_s)
        return result

    def post(self, function: Callable[[], object], *, payer: str = "") -> None:
        """Runs a short function before any waiting step, without a result; it is never refused.

        ``payer`` is the peer whose time it takes.
        """
        item = Call(function, is_training=False, load=LITTLE, payer=payer)
        item.future.add_done_callback(log_outcome)
        self._thread.submit(item)

    async def train(
        self, function: Callable[[], T] | Parts[T], *, timeout_s: float, peer: str = "", load: Load = LITTLE
    ) -> T:
        """Runs a training forward or backward; steps run between its blocks, and peers take turns.

        Long work comes in parts, and each part waits for its turn; ``load`` is that of one part.

        Raises:
            RequestError: ``overloaded`` if too much waits or ``timeout_s`` passes.
        """
        item = Call(function, is_training=True, peer=peer, load=load)
        result: T = await self._submit(item, self._waiting_trainings, timeout_s)
        return result

    async def step(
        self,
        inputs: StepInputs,
        *,
        timeout_s: float,
        prepare: Callable[[], None] | None = None,
        peer: str = "",
        takes_long: bool = False,
        on_chunk: OnChunk | None = None,
    ) -> SpanOutputs:
        """Runs the new tokens of one session, packed with other sessions'; other queued work must not touch its cache.

        ``prepare`` runs on the compute thread right before: the cache operations that come with the step. Peers take
        turns when not all waiting steps fit in one forward. A step that ``takes_long`` takes turns with training.

        Raises:
            RequestError: ``overloaded`` if too much waits or ``timeout_s`` passes.
        """
        item = Step(inputs, prepare, peer, takes_long=takes_long, on_chunk=on_chunk)
        result: SpanOutputs = await self._submit(item, self._waiting_steps, timeout_s)
        return result

    async def _submit(self, item: Work, waiting: Ledger, timeout_s: float) -> Any:
        if self._thread.is_stopping:
            raise RequestError("overloaded", "this server is shutting down: ask another one")
        # The server's own work is never refused.
        amount = 1 if item.peer else 0
        try:
            waiting.claim(item.peer, amount)
        except CapacityError as error:
            raise RequestError("overloaded", str(error)) from None
        self.num_waiting += 1
        # Cheaper than asyncio.timeout. Set before the item is handed over: from then on the compute thread waits for
        # this thread to release the interpreter.
        timer = item.loop.call_later(timeout_s, item.expire, timeout_s)
        self._thread.submit(item)
        try:
            return await item.future
        finally:
            timer.cancel()
            # Cancelled (the client is gone) or too late: dropped before it runs, or between two blocks.
            item.abandoned = True
            self.num_waiting -= 1
            waiting.release(item.peer, amount)
