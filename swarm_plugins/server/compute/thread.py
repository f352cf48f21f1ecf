"""One compute thread for all tensors of a server; decode steps go before training.

It collects every waiting session step, packs them into one forward (continuous batching: Yu et al. 2022, "Orca",
section 4), cuts long prefills along the sequence, and takes a part of long work when no step goes before it: training,
and steps with adapters that take long to apply. While that runs, the runner calls back between two blocks and waiting
steps run right there, so a decode step waits for about one block, not for a whole batch. Every piece of work is charged
to its peer by the time that it took. Steps do not interrupt the long work of a peer that has had less time than theirs.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from swarm_plugins.offload.held import HeldExperts
from swarm_plugins.server.compute.arrivals import Arrivals
from swarm_plugins.server.compute.rhythm import BusyMeter
from swarm_plugins.server.compute.turns import Turns
from swarm_plugins.server.compute.work import AbandonedError, Call, Step, Work, choose_pack, without_frames
from swarm_plugins.server.failures import RequestError
from swarm_plugins.server.hosted import HostedSpans
from swarm_plugins.server.state.points import Points
from swarm_plugins.transport.messages import FailureKind

log = logging.getLogger(__name__)

_PACKS_BEFORE_LONG = 8
"""Packs that may go before waiting long work in a row, whatever its peer has had. Steps run between its blocks."""
_LITTLE_S = 0.005
"""Calls and cache operations that wait may take so long before each pack; the rest wait for the next one."""


class ComputeThread:
    """Runs submitted work, whose peers take turns.

    Args:
        runner: The span, or what holds experts.
        points: How peers share the turns.
        chunk_tokens: Tokens in one packed forward of session steps.
    """

    def __init__(self, runner: HostedSpans | HeldExperts, points: Points, chunk_tokens: int) -> None:
        self._runner = runner
        self._chunk_tokens = chunk_tokens
        self.packs: Counter[int] = Counter()
        """Forwards of session steps so far, by the number of steps that shared one."""
        self.busy = BusyMeter()
        self.is_stopping = False
        self._inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._calls: deque[Call] = deque()
        self._steps: list[Step] = []
        self._long: deque[Call | Step] = deque()
        self._current: Call | Step | None = None
        """Long work that runs."""
        self._interrupted_s = 0.0
        """How long other work has run between the blocks of long work, in all."""
        self._began_s = 0.0
        """When long work began."""
        self._packs_since_long = 0
        self._turns = Turns(points)
        self._arrivals = Arrivals()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="swarm-compute", daemon=True)
            self._thread.start()

    def submit(self, item: Work) -> None:
        """Hands over work; called on any thread."""
        self._inbox.put(item)

    def stop(self, timeout_s: float) -> None:
        """Fails what waits, ends the thread after what it runs now. Idempotent."""
        self.is_stopping = True
        if self._thread is None:
            return
        self._inbox.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the compute thread is still busy after %.0f s; it is left to end with the process", timeout_s)
        self._thread = None

    def _run(self) -> None:
        while not self.is_stopping:
            try:
                self._run_round()
            except Exception:
                # Of the scheduling: work raises where its result is awaited. A server without this thread is silent.
                log.exception("choosing what runs next has failed: all that waits is refused")
                self._fail_waiting("internal", "this server failed to choose what runs next: ask another one")
        self._fail_waiting("overloaded", "this server is shutting down: ask another one")

    def _run_round(self) -> None:
        """Takes what has come, waits for some if there is none, and runs a part of it."""
        self._collect(is_waiting=not (self._calls or self._steps or self._long))
        self._gather()
        self.busy.begin(time.monotonic())
        self._drop_abandoned()
        self._run_own()
        self._run_next()
        self.busy.end(time.monotonic())

    def _run_own(self) -> None:
        """Runs the server's own calls: they close sessions, whose memory has been promised to what waits."""
        with torch.inference_mode():
            for call in [call for call in self._calls if not call.peer]:
                self._run_call(call)
        self._calls = deque(call for call in self._calls if not call.has_ended)

    def _run_next(self) -> None:
        """Runs a part of long work, or what goes before it."""
        long = self._turns.order(self._long)[0] if self._long else None
        urgent = self._urgent_before(long)
        if long is not None and (not urgent or self._packs_since_long >= _PACKS_BEFORE_LONG):
            self._run_long(long)
        else:
            self._packs_since_long += long is not None
            self._run_urgent(urgent)

    def _drop_abandoned(self) -> None:
        """Drops work whose client is gone: its memory is not counted any more, so it does not wait for its turn."""
        gone = [one for one in (*self._calls, *self._steps, *self._long) if one.abandoned and not one.has_ended]
        for item in gone:
            item.drop()
        if gone:
            # By what has been dropped: the event loop may give up more of them at any time.
            self._calls = deque(item for item in self._calls if not item.has_ended)
            self._steps = [item for item in self._steps if not item.has_ended]
            self._long = deque(item for item in self._long if not item.has_ended)

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
        """Waits a moment, once, for sessions that are about to come, if they can share the next forward."""
        ends = math.inf
        while self._steps and not self._long:
            blocks = self._steps[0].inputs.blocks
            if any(step.num_left > 1 or step.inputs.blocks != blocks for step in self._steps):
                return
            now = time.monotonic()
            # Those that come may make others worth a wait, again and again: the first wait sets the end.
            ends = min(ends, now + self._arrivals.rhythm(blocks).wait_s({step.session for step in self._steps}, now))
            if ends <= now or self.is_stopping:
                return
            try:
                item = self._inbox.get(timeout=ends - now)
            except queue.Empty:
                return
            self._sort_in(item)
            self._collect(is_waiting=False)
            if self._calls:
                return

    def _sort_in(self, item: Work | None) -> None:
        if isinstance(item, Step) or (isinstance(item, Call) and item.is_training):
            self._arrivals.came(item.peer, time.monotonic())
        if isinstance(item, Step):
            if item.takes_long:
                self._long.append(item)
            else:
                self._steps.append(item)
                self._arrivals.rhythm(item.inputs.blocks).arrived(item.session, item.arrived)
        elif isinstance(item, Call):
            (self._long if item.is_training else self._calls).append(item)

    def _urgent_before(self, long: Call | Step | None, had_s: float = 0.0) -> list[Call | Step]:
        """Returns the steps and the oldest call of each peer in their order: all, or those that go before long work.

        All steps of its own peer do. Of other peers, those that have had less time do, and the rest wait for its end.
        ``had_s`` is how long it has run, in seconds.
        """
        oldest = dict[str, Call]()
        for call in self._calls:
            oldest.setdefault(call.peer, call)
        waiting: list[Call | Step] = [*oldest.values(), *self._steps]
        return self._turns.order(waiting) if long is None else self._turns.before(long, waiting, had_s)

    def _run_long(self, item: Call | Step) -> None:
        """Runs a part of long work."""
        self._long.remove(item)
        self._packs_since_long = 0
        interrupted = self._current, self._began_s
        self._current, self._began_s = item, self._worked_s
        self._runner.on_block_boundary = self._between_blocks
        try:
            if isinstance(item, Step):
                self._run_step(item)
            else:
                # Also where it interrupts a step, which runs without gradients.
                with torch.inference_mode(mode=False):
                    self._run_call(item)
        finally:
            self._runner.on_block_boundary = None
            self._current, self._began_s = interrupted
        if item.has_ended:
            return
        if item.abandoned:
            item.drop()
        else:
            # The parts of a request let its own peer's next one go in between.
            self._long.append(item)

    def _between_blocks(self) -> None:
        """Runs urgent work in the middle of long work; called by the runner between two blocks."""
        # Before the flag is read: a message that closes a session's cache comes after its step has been abandoned.
        self._collect(is_waiting=False)
        current, work = self._current, self.busy.work
        if current is None:
            return
        if current.abandoned:
            raise AbandonedError
        if self._calls or self._steps or self._long:
            self._interrupt(current)
        self.busy.begin(time.monotonic(), work)

    def _interrupt(self, current: Call | Step) -> None:
        began, had_s, interrupted_s = time.monotonic(), self._worked_s - self._began_s, self._interrupted_s
        self._drop_abandoned()
        # Only long work is interrupted, never a pack.
        self._runner.on_block_boundary = None
        try:
            self._run_own()
            self._run_urgent(self._urgent_before(current, had_s))
            training = self._training_before(current, had_s)
            if training is not None:
                self._run_long(training)
        finally:
            self._runner.on_block_boundary = self._between_blocks
        # Interruptions of what interrupts are part of it.
        self._interrupted_s = interrupted_s + time.monotonic() - began

    def _training_before(self, current: Call | Step, had_s: float) -> Call | None:
        """Returns the training of another peer that goes before a step that takes long, if there is one.

        Training never interrupts training: both graphs would take memory. The server's own work, which changes spans,
        waits as well.
        """
        if not isinstance(current, Step):
            return None
        waiting = [item for item in self._long if isinstance(item, Call) and item.peer not in ("", current.peer)]
        return next(iter(self._turns.before(current, waiting, had_s)), None)

    @property
    def _worked_s(self) -> float:
        """A clock that stands still for long work while it is interrupted."""
        return time.monotonic() - self._interrupted_s

    def _run_call(self, item: Call) -> None:
        """Runs a call, or the next part of one. Never raises."""
        self.busy.begin(time.monotonic(), item.work)
        began, is_over, failure = self._worked_s, True, None
        try:
            is_over = item.run_part()
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            failure = error
        # Before the result is handed over: then the event loop takes the interpreter.
        seconds = self._worked_s - began
        self._turns.had(item.payer, seconds)
        if item.work and failure is None:
            self._turns.ran(item.work, seconds)
        if failure is not None:
            item.finish(error=without_frames(failure))
        elif is_over:
            item.finish(item.result)

    def _run_step(self, step: Step) -> None:
        """Runs some tokens of a step that takes long. Never raises."""
        with torch.inference_mode():
            if self._begin(step):
                self._run_group(choose_pack([step], self._chunk_tokens))

    def _run_urgent(self, urgent: Sequence[Call | Step]) -> None:
        """Runs calls for a moment, then one pack of steps. Never raises."""
        with torch.inference_mode():
            ends = time.monotonic() + _LITTLE_S
            is_first = True
            for item in urgent:
                if isinstance(item, Call) and (is_first or time.monotonic() < ends):
                    self._run_call(item)
                    is_first = False
            self._calls = deque(call for call in self._calls if not call.has_ended)
            ready = self._ready([item for item in urgent if isinstance(item, Step)], ends)
            if ready:
                self._run_group(choose_pack(ready, self._chunk_tokens))
            self._steps = [step for step in self._steps if not step.has_ended]

    def _ready(self, steps: Sequence[Step], ends: float) -> list[Step]:
        """Returns the steps of one forward: on the blocks of the first, and begun, or beginning until ``ends``."""
        ready: list[Step] = []
        is_shared, most_rows = self._arrivals.are_shared(time.monotonic()), math.inf
        rows = Counter[str]()
        may_operate = True  # one does in each round, however long the calls took
        for step in steps:
            # One forward a round: sessions of one peer on many ranges of blocks would get as many in its turn.
            if ready and step.inputs.blocks != ready[0].inputs.blocks:
                continue
            operates = step.prepare is not None
            # Many sessions of one peer take turns: others, which may come at any time, would wait for all of them.
            is_one_too_many = rows[step.peer] > 0 and rows[step.peer] + step.batch_size > most_rows
            if is_one_too_many or (operates and not may_operate):
                continue
            if self._begin(step):
                if is_shared and not ready:
                    most_rows = self._arrivals.rhythm(step.inputs.blocks).free_rows
                ready.append(step)
                rows[step.peer] += step.batch_size
            if operates:
                may_operate = time.monotonic() < ends
        return ready

    def _begin(self, step: Step) -> bool:
        """Runs the cache operations of a step that has not begun; False drops the step."""
        if step.prepare is None:
            step.begin()
            return True
        began = self._worked_s
        try:
            step.begin()
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            step.finish(error=without_frames(error))
        self._turns.had(step.peer, self._worked_s - began)
        return not step.has_ended

    def _run_group(self, group: Sequence[tuple[Step, int]]) -> bool:
        """Runs a pack; returns whether all of it has run. Never raises."""
        self.busy.begin(time.monotonic(), sum(step.work_of(num_tokens) for step, num_tokens in group))
        began = self._worked_s
        try:
            runner = cast(HostedSpans, self._runner)
            device = runner.spec.device
            chunks = [step.chunk(num_tokens).map(lambda tensor: tensor.to(device)) for step, num_tokens in group]
            outputs = [output.map(Tensor.cpu) for output in runner.step(chunks)]
            for (step, _), chunk, output in zip(group, chunks, outputs, strict=True):
                step.add(chunk, output)
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            seconds = self._worked_s - began
            if len(group) > 1:
                # One step is at fault: run alone, only that one fails. Its peer had the time of all.
                self._charge([member for member in group if not self._run_group([member])], seconds)
                return False
            self._charge(group, seconds)
            self._fail(group[0][0], error)
            return False
        seconds = self._worked_s - began
        self._turns.ran(self._charge(group, seconds), seconds)
        self.packs[len(group)] += 1
        if all(chunk.hidden.shape[1] == 1 for chunk in chunks) and not group[0][0].takes_long:
            rows = sum(chunk.hidden.shape[0] for chunk in chunks)
            self._arrivals.rhythm(group[0][0].inputs.blocks).ran(rows, seconds)
        ended = time.monotonic()
        for step, _ in group:
            if not step.num_left:
                # Before finish: once the result is handed over, the event loop takes the interpreter.
                self._arrivals.rhythm(step.inputs.blocks).answered(step.session, ended)
                step.finish(step.result())
        return True

    def _charge(self, group: Sequence[tuple[Step, int]], seconds: float) -> int:
        """Charges each step of a pack for its part of the tokens and blocks; returns how many there are in all."""
        parts = [(step.peer, step.work_of(num_tokens)) for step, num_tokens in group]
        work = sum(part for _, part in parts)
        for peer, part in parts:
            self._turns.had(peer, seconds * part / work)
        return work

    def _fail(self, step: Step, error: Exception) -> None:
        if step.abandoned:
            step.drop()
            return
        try:
            step.undo()
        except Exception:
            log.exception("a failed step could not be taken back")
        step.finish(error=without_frames(error))

    def _fail_waiting(self, kind: FailureKind, message: str) -> None:
        self._collect(is_waiting=False)
        for item in (*self._calls, *self._steps, *self._long):
            item.finish(error=RequestError(kind, message))
        for waiting in (self._calls, self._steps, self._long):
            waiting.clear()
