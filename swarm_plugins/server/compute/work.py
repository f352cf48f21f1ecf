"""Work for the compute thread, awaited on an event loop: its order, and the steps that share a forward."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from swarm_plugins.block_io import SpanOutputs, join_outputs
from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.errors import ConfigError
from swarm_plugins.server.failures import RequestError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Load(NamedTuple):
    """How much a function computes."""

    tokens: int = 1
    blocks: int = 0


LITTLE = Load()
"""Of what computes on no tokens: cache operations, norms, checks. It is charged for, but teaches no pace."""

OnChunk = Callable[[Sequence[SpanOutputs]], None]
"""Called on the compute thread with a step's outputs so far, before its next chunk makes room. Must not raise."""

Parts = Generator[None, None, T]
"""A function in parts: other work may run wherever it yields; it returns the result."""

_SHARE_OF_FIRST = 4
"""A prefill whose turn it is gets this part of a pack, whatever decode steps wait."""


class AbandonedError(Exception):
    """Stops long work in mid-run because its client is gone."""


class Work:
    """Work whose result is awaited on an event loop; ``peer`` is empty for the server itself."""

    __slots__ = ("abandoned", "future", "has_ended", "loop", "peer")

    def __init__(self, peer: str = "") -> None:
        self.peer = peer
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.abandoned = False
        """Whether its client no longer waits, also because it has the result."""
        self.has_ended = False

    def finish(self, result: object = None, error: BaseException | None = None) -> None:
        """Hands the outcome to the event loop; called on the compute thread."""
        self.has_ended = True
        try:
            self.loop.call_soon_threadsafe(self._settle, result, error)
        except RuntimeError:
            log.debug("a result came after the event loop was closed")

    def drop(self) -> None:
        """Gives up work whose client is gone, and frees what it holds; called on the compute thread."""
        raise NotImplementedError

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
    """A function to run, urgent (cache operations) or not (training), at once or in parts."""

    __slots__ = ("_load", "_parts", "is_training", "payer", "result")

    def __init__(
        self,
        function: Callable[[], Any] | Parts[Any],
        *,
        is_training: bool,
        peer: str = "",
        load: Load,
        payer: str = "",
    ) -> None:
        super().__init__(peer)
        self.payer = peer or payer
        """Who is charged for it."""
        self._parts = _in_one_part(function) if callable(function) else function
        self._load = load
        self.is_training = is_training
        self.result: Any = None

    @property
    def work(self) -> int:
        """Tokens times blocks of one part."""
        return self._load.tokens * self._load.blocks

    def run_part(self) -> bool:
        """Runs the next part; returns whether it was the last one, which leaves the ``result``."""
        try:
            next(self._parts)
        except StopIteration as end:
            self.result = end.value
            return True
        return False

    def drop(self) -> None:
        """Ends the function where it is."""
        self.has_ended = True
        self._parts.close()


def _in_one_part(function: Callable[[], T]) -> Parts[T]:
    result = function()
    yield from ()
    return result


class Step(Work):
    """New tokens of one session, which may run in several chunks; ``prepare`` runs before the first.

    A step that ``takes_long`` runs as training does: alone, and others run between its blocks.
    """

    __slots__ = ("_cached", "_num_done", "_outputs", "arrived", "inputs", "on_chunk", "prepare", "takes_long")

    def __init__(
        self,
        inputs: StepInputs,
        prepare: Callable[[], None] | None,
        peer: str = "",
        *,
        takes_long: bool = False,
        on_chunk: OnChunk | None = None,
    ) -> None:
        super().__init__(peer)
        self.arrived = time.monotonic()
        self.inputs = inputs
        self.prepare = prepare
        self.takes_long = takes_long
        self.on_chunk = on_chunk
        self._num_done = 0
        self._cached: int | None = None
        self._outputs: list[SpanOutputs] = []

    @property
    def session(self) -> int:
        """What tells this session from others."""
        return id(self.inputs.cache)

    @property
    def batch_size(self) -> int:
        """Rows of the step."""
        return int(self.inputs.hidden.shape[0])

    @property
    def num_left(self) -> int:
        """Tokens per row that have not run."""
        return int(self.inputs.hidden.shape[1]) - self._num_done

    @property
    def least(self) -> int:
        """How many of its tokens per row have to run next at once.

        All, if tokens see later ones.
        """
        inputs = self.inputs
        if inputs.layer_masks is not None:
            return self.num_left
        if self._num_done or self.num_left == 1:
            return 1
        return inputs.num_together(inputs.cache.length) or 1

    @property
    def work(self) -> int:
        """Tokens of all rows that have not run, times blocks."""
        return self.work_of(self.num_left)

    def work_of(self, num_tokens: int) -> int:
        """Returns how much so many tokens per row are, in tokens times blocks."""
        return self.batch_size * num_tokens * len(self.inputs.blocks)

    def begin(self) -> None:
        """Prepares the cache and notes its length before the first chunk. Idempotent."""
        prepare, self.prepare = self.prepare, None
        if prepare is not None:
            prepare()
        if self._cached is None:
            self._cached = self.inputs.cache.length

    def drop(self) -> None:
        """Takes back what has run, if the session is still open."""
        self.has_ended = True
        with contextlib.suppress(ConfigError):
            self.undo()

    def undo(self) -> None:
        """Takes back the chunks that have run."""
        if self._num_done and self._cached is not None:
            self.inputs.cache.crop(self._cached)

    def chunk(self, num_tokens: int) -> StepInputs:
        """Returns the next ``num_tokens`` tokens per row as a step of their own."""
        whole, first = self.inputs, self._num_done
        if first == 0 and num_tokens == self.num_left:
            return whole
        chunk = whole.take_tokens(first, first + num_tokens)
        return replace(chunk, goes_on=first > 0, to_come=self.num_left - num_tokens)

    def add(self, chunk: StepInputs, outputs: SpanOutputs) -> None:
        """Takes the outputs of the latest chunk."""
        self._num_done += int(chunk.hidden.shape[1])
        self._outputs.append(outputs)
        if self.on_chunk is not None and self.num_left:
            self.on_chunk(self._outputs)

    def result(self) -> SpanOutputs:
        """Returns the outputs of the whole step."""
        return join_outputs(self._outputs, dim=1)


def choose_pack(waiting: Sequence[Step], max_tokens: int) -> list[tuple[Step, int]]:
    """Returns the steps of the next packed forward, with the number of tokens per row to run.

    Short steps (decode) go first, in their order; prefills take the room they leave, cut to fit in ``max_tokens`` (rows
    times length). But a prefill whose turn it is gets a quarter of the pack: wide or many decode steps, which come
    again and again, would otherwise keep it waiting for ever. The first step runs with at least one token per row, or
    those that belong together, so that one wider than the pack makes progress.
    """
    chosen: dict[int, int] = {}
    room = max_tokens

    def take(index: int, most: int) -> None:
        nonlocal room
        step, had = waiting[index], chosen.get(index, 0)
        num_tokens = min(step.num_left - had, max(most // step.batch_size, not chosen))
        least = step.least - had
        if num_tokens < least:
            num_tokens = 0 if chosen else least
        if num_tokens > 0:
            chosen[index] = had + num_tokens
            room = max(0, room - num_tokens * step.batch_size)

    if waiting and waiting[0].num_left > 1:
        take(0, max_tokens // _SHARE_OF_FIRST)
    for index in sorted(range(len(waiting)), key=lambda one: waiting[one].num_left > 1):
        take(index, room)
    return [(waiting[index], num_tokens) for index, num_tokens in chosen.items()]


def log_outcome(future: asyncio.Future[Any]) -> None:
    """Logs the failure of work that nobody awaits."""
    if not future.cancelled() and future.exception() is not None:
        log.error("a cache operation failed", exc_info=future.exception())


def without_frames(error: BaseException) -> BaseException:
    """Drops the locals (tensors, graphs) that a traceback keeps alive; its lines stay for the log."""
    traceback.clear_frames(error.__traceback__)
    return error
