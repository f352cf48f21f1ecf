"""One compute thread for all tensors of a server; decode steps go before training.

The asyncio side submits work and awaits its result. The compute thread collects every waiting session step, packs
them into one forward (continuous batching: Yu et al. 2022, "Orca", section 4), cuts long prefills along the sequence,
and takes a training item only when no step waits. While a training item runs, the runner calls back between two
blocks and waiting steps run right there, so a decode step waits for about one block, not for a whole batch.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from swarm_plugins.block_io import SpanOutputs
from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.errors import CapacityError
from swarm_plugins.ledger import Ledger
from swarm_plugins.offload.held import HeldExperts
from swarm_plugins.server.compute.rhythm import BusyMeter, Rhythm
from swarm_plugins.server.compute.turns import Turns
from swarm_plugins.server.compute.work import (
    LITTLE,
    Call,
    Load,
    Step,
    Work,
    choose_pack,
    log_outcome,
    without_frames,
)
from swarm_plugins.server.failures import RequestError
from swarm_plugins.server.hosted import HostedSpans
from swarm_plugins.server.state.points import Points

log = logging.getLogger(__name__)

T = TypeVar("T")

_PACKS_BEFORE_TRAINING = 8
"""Packs that may go before a waiting training item in a row. It then starts, and steps run between its blocks."""


class AbandonedError(Exception):
    """Stops a training item in mid-run because its client is gone."""


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
        self._chunk_tokens = chunk_tokens
        self._runner = runner
        self._inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._calls: deque[Call] = deque()
        self._steps: list[Step] = []
        self._trainings: deque[Call] = deque()
        self._current_training: Call | None = None
        self._packs_since_training = 0
        self.points = points or Points()
        self._waiting_steps = Ledger(max_waiting_steps, noun="waiting steps", groups=self.points)
        self._waiting_trainings = Ledger(max_waiting_trainings, noun="waiting requests", groups=self.points)
        self.num_waiting = 0
        """Requests that have been submitted and not answered."""
        self.packs: Counter[int] = Counter()
        """Forwards of session steps so far, by the number of steps that shared one."""
        self._turns = Turns(self.points)
        self._busy = BusyMeter()
        self._rhythm = Rhythm()
        self._thread: threading.Thread | None = None
        self._is_stopping = False

    # -- the asyncio side ---------------------------------------------------------------------------------------------

    @property
    def load(self) -> float:
        """Share of the last seconds in which the compute thread was busy, 0 to 1."""
        return self._busy.share(time.monotonic())

    @property
    def busy_s(self) -> float:
        """Seconds that the compute thread has worked so far."""
        return self._busy.seconds(time.monotonic())

    def is_stuck(self, usual_s: float) -> bool:
        """Returns whether the compute thread hangs in its work, one piece of which takes about ``usual_s``."""
        return self._busy.is_stuck(time.monotonic(), usual_s)

    def start(self) -> None:
        """Starts the compute thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="swarm-compute", daemon=True)
            self._thread.start()

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Fails what waits, ends the thread after what it runs now. Idempotent."""
        self._is_stopping = True
        if self._thread is None:
            return
        self._inbox.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the compute thread is still busy after %.0f s; it is left to end with the process", timeout_s)
        self._thread = None

    async def call(self, function: Callable[[], T], *, timeout_s: float, peer: str = "", load: Load = LITTLE) -> T:
        """Runs a short function, such as a cache operation, before any waiting step; peers take turns.

        Raises:
            RequestError: ``overloaded`` if too much waits or ``timeout_s`` passes.
        """
        item = Call(function, is_training=False, peer=peer, load=load)
        result: T = await self._submit(item, self._waiting_steps, timeout_s)
        return result

    def post(self, function: Callable[[], object]) -> None:
        """Runs a short function before any waiting step, without a result; it is never refused."""
        item = Call(function, is_training=False, load=LITTLE)
        item.future.add_done_callback(log_outcome)
        self._inbox.put(item)

    async def train(self, function: Callable[[], T], *, timeout_s: float, peer: str = "", load: Load = LITTLE) -> T:
        """Runs a training forward or backward; steps run between its blocks, and peers take turns.

        Raises:
            RequestError: ``overloaded`` if too much waits or ``timeout_s`` passes.
        """
        item = Call(function, is_training=True, peer=peer, load=load)
        result: T = await self._submit(item, self._waiting_trainings, timeout_s)
        return result

    async def step(
        self, inputs: StepInputs, *, timeout_s: float, prepare: Callable[[], None] | None = None, peer: str = ""
    ) -> SpanOutputs:
        """Runs the new tokens of one session, packed with other sessions'; other queued work must not touch its cache.

        ``prepare`` runs on the compute thread right before: the cache operations that come with the step. Peers take
        turns when not all waiting steps fit in one forward.

        Raises:
            RequestError: ``overloaded`` if too much waits or ``timeout_s`` passes.
        """
        result: SpanOutputs = await self._submit(Step(inputs, prepare, peer), self._waiting_steps, timeout_s)
        return result

    async def _submit(self, item: Work, waiting: Ledger, timeout_s: float) -> Any:
        if self._is_stopping:
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
        self._inbox.put(item)
        try:
            return await item.future
        finally:
            timer.cancel()
            # Cancelled (the client is gone) or too late: dropped before it runs, or between two blocks.
            item.abandoned = True
            self.num_waiting -= 1
            waiting.release(item.peer, amount)

    # -- the compute thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            has_work = bool(self._calls or self._steps or self._trainings)
            self._collect(is_waiting=not has_work)
            self._gather()
            self._busy.begin(time.monotonic())
            if self._trainings and self._packs_since_training >= _PACKS_BEFORE_TRAINING:
                self._run_training(self._next_training())
            elif self._calls or self._steps:
                self._packs_since_training += bool(self._trainings)
                self._run_urgent()
            elif self._trainings:
                self._run_training(self._next_training())
            self._busy.end(time.monotonic())
        self._fail_waiting()

    def _collect(self, *, is_waiting: bool) -> None:
        """Sorts submitted work into the queues; blocks for the first item if ``is_waiting``."""
        try:
            item = self._inbox.get() if is_waiting else self._inbox.get_nowait()
            while True:
                self._sort_in(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _gather(self) -> None:
        """Waits a moment for sessions that are about to come, if they can share the next forward."""
        while self._steps and not self._trainings and all(step.num_left == 1 for step in self._steps):
            now = time.monotonic()
            wait_s = self._rhythm.wait_s({step.session for step in self._steps}, now)
            if wait_s <= 0 or self._is_stopping:
                return
            try:
                item = self._inbox.get(timeout=wait_s)
            except queue.Empty:
                return
            self._sort_in(item)
            self._collect(is_waiting=False)
            if self._calls:
                return

    def _sort_in(self, item: Work | None) -> None:
        if isinstance(item, Step):
            self._steps.append(item)
            self._rhythm.arrived(item.session, item.arrived)
        elif isinstance(item, Call):
            (self._trainings if item.is_training else self._calls).append(item)

    def _next_training(self) -> Call:
        item = self._turns.order(self._trainings)[0]
        self._trainings.remove(item)
        return item

    def _run_training(self, item: Call) -> None:
        self._packs_since_training = 0
        if item.abandoned:
            return
        self._turns.had(item.peer, item.num_tokens)
        self._current_training = item
        self._runner.on_block_boundary = self._between_blocks
        try:
            self._run_call(item)
        finally:
            self._runner.on_block_boundary = None
            self._current_training = None

    def _between_blocks(self) -> None:
        """Runs urgent work in the middle of a training item; called by the runner between two blocks."""
        training = self._current_training
        if training is not None and training.abandoned:
            raise AbandonedError
        self._collect(is_waiting=False)
        if self._calls or self._steps:
            # Only the training item is interrupted, never a step.
            self._runner.on_block_boundary = None
            try:
                self._run_urgent()
            finally:
                self._runner.on_block_boundary = self._between_blocks
        self._busy.begin(time.monotonic())

    def _run_call(self, item: Call) -> None:
        self._busy.begin(time.monotonic())
        try:
            result = item.function()
        except AbandonedError:
            log.debug("a training request was abandoned in mid-run")
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            item.finish(error=without_frames(error))
        else:
            self.points.served(item.peer, item.load.tokens * item.load.blocks)
            item.finish(result)

    def _run_urgent(self) -> None:
        """Runs a waiting call of each peer, then one pack of the waiting steps. Never raises."""
        with torch.inference_mode():
            for call in self._take_calls():
                if not call.abandoned:
                    self._run_call(call)
            self._steps = [step for step in self._steps if self._is_ready(step)]
            groups: dict[range, list[tuple[Step, int]]] = {}
            chosen = choose_pack(self._turns.order(self._steps), self._chunk_tokens)
            for step, num_tokens in chosen:
                self._turns.had(step.peer, num_tokens * step.batch_size)
                groups.setdefault(step.inputs.blocks, []).append((step, num_tokens))
            for group in groups.values():
                self._run_group(group)

    def _take_calls(self) -> list[Call]:
        """Removes the oldest call of each peer, and all of the server's own: a flood makes only its peer wait."""
        chosen: list[Call] = []
        left: deque[Call] = deque()
        peers: set[str] = set()
        for call in self._calls:
            (left if call.peer in peers else chosen).append(call)
            if call.peer:
                peers.add(call.peer)
        self._calls = left
        return chosen

    def _is_ready(self, step: Step) -> bool:
        """Runs the cache operations of a step that has not begun; False drops the step."""
        try:
            if step.abandoned:
                step.undo()
                return False
            step.begin()
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            step.finish(error=without_frames(error))
            return False
        return True

    def _run_group(self, group: Sequence[tuple[Step, int]]) -> None:
        self._busy.begin(time.monotonic())
        try:
            runner = cast(HostedSpans, self._runner)
            device = runner.spec.device
            chunks = [step.chunk(num_tokens).map(lambda tensor: tensor.to(device)) for step, num_tokens in group]
            started = time.monotonic()
            outputs = [output.map(Tensor.cpu) for output in runner.step(chunks)]
            ended = time.monotonic()
            for (step, _), chunk, output in zip(group, chunks, outputs, strict=True):
                step.add(chunk, output)
                self.points.served(step.peer, chunk.num_tokens * len(chunk.blocks))
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            if len(group) > 1:
                # One step is at fault: run alone, only that one fails.
                for member in group:
                    self._run_group([member])
                return
            self._fail(group[0][0], error)
            return
        self.packs[len(group)] += 1
        if all(chunk.hidden.shape[1] == 1 for chunk in chunks):
            self._rhythm.ran(sum(chunk.hidden.shape[0] for chunk in chunks), ended - started)
        for step, _ in group:
            if not step.num_left:
                self._steps.remove(step)
                # Before finish: once the result is handed over, the event loop takes the interpreter.
                self._rhythm.answered(step.session, ended)
                step.finish(step.result())

    def _fail(self, step: Step, error: Exception) -> None:
        self._steps.remove(step)
        try:
            step.undo()
        except Exception:
            log.exception("a failed step could not be taken back")
        step.finish(error=without_frames(error))

    def _fail_waiting(self) -> None:
        self._collect(is_waiting=False)
        error = RequestError("overloaded", "this server is shutting down: ask another one")
        for item in (*self._calls, *self._steps, *self._trainings):
            item.finish(error=error)
        self._calls.clear()
        self._steps.clear()
        self._trainings.clear()
