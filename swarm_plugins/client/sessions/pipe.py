"""One step of a session through a chain: in chunks that several servers work on at once, repaired where a server fails.

Each span takes the chunks in order and works on one while the spans after it work on those before, as in GPipe (Huang
et al., 2019), but for a prompt: a chunk's keys and values are in the cache when the next one comes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from swarm_plugins.block_io import SpanInputs, SpanOutputs, chain_outputs, join_outputs
from swarm_plugins.client.answers import check_same_routers
from swarm_plugins.client.handing import PostedInVainError, is_handing_on
from swarm_plugins.client.sessions.pushing import PushedSteps
from swarm_plugins.client.sessions.span_session import SpanSession
from swarm_plugins.client.sessions.span_steps import SpanSteps, neighbors
from swarm_plugins.errors import SwarmError
from swarm_plugins.routing import Demand

if TYPE_CHECKING:
    from swarm_plugins.client.discovery.view import Servers
    from swarm_plugins.client.retries import ChainRetries

_LEAST_TOKENS = 128
"""Of all rows in one chunk: most of a smaller one's time is reading weights, and a mixture reads all of its experts."""
_MAX_CHUNKS = 16
_NEAR_BEST = 1.05
_MESSAGE_S = 0.005
"""What a message takes beyond computing."""


class Pipe:
    """Runs one step.

    Args:
        servers: Who runs it, and others if they fail.
        spans: The chain; the property ``spans`` holds those that took over after a failure.
        inputs: The new tokens.
        cached: Tokens per row in the cache.
        retries: Counts failures.
    """

    def __init__(
        self, servers: Servers, spans: Sequence[SpanSession], inputs: SpanInputs, cached: int, retries: ChainRetries
    ) -> None:
        self._servers = servers
        self._steps = SpanSteps(servers)
        self._stages = [[span] for span in spans]
        self._inputs = inputs
        self._cached = cached
        self._retries = retries

    @property
    def spans(self) -> list[SpanSession]:
        """The sessions that hold the step now, in the order of their blocks."""
        return [span for stage in self._stages for span in stage]

    async def run(self) -> SpanOutputs:
        """Runs the step; raises like `ChainCall`."""
        pushed = await self._pushed()
        chunks = self._chunks(is_pushed=pushed is not None)
        try:
            if len(chunks) == 1:
                return await self._run_at_once(pushed)
            return await self._run_chunks(chunks, pushed)
        finally:
            if pushed is not None:
                await pushed.close()

    # -- what to do ---------------------------------------------------------------------------------------------------

    async def _pushed(self) -> PushedSteps | None:
        """Opens the sessions; returns None unless each server is to get its input from the one before."""
        servers, spans = self._servers, self.spans
        if len(spans) < 2:
            return None
        if any(span.channel is None for span in spans):
            rows = self._inputs.hidden.shape[0]
            await asyncio.gather(*(self._steps.open_ahead(span, rows) for span in spans))
        are_ready = all(span.channel is not None for span in spans) and all(span.push_key for span in spans[1:])
        if not is_handing_on(servers, [span.peer for span in spans]) or not are_ready:
            return None
        return PushedSteps(spans, servers)

    def _chunks(self, *, is_pushed: bool) -> list[SpanInputs]:
        """Cuts the new tokens so that the prompt is through soonest."""
        rows, tokens = self._inputs.hidden.shape[:2]
        if tokens == 1:
            return [self._inputs]
        spans, least = self.spans, 1
        if is_pushed:
            parts = [(span, replace(self._inputs, blocks=span.blocks)) for span in spans]
            least = math.ceil(tokens / min(self._steps.tokens_at_once(span, part) for span, part in parts))
        most = rows * tokens // _LEAST_TOKENS
        if len(spans) > 1 and most > 1:
            step_s, token_s = self._pace(spans, is_pushed=is_pushed)
            least = max(least, min(num_chunks(len(spans), rows * tokens, step_s, token_s), most))
        size = math.ceil(tokens / least)
        return [self._inputs.take_tokens(start, start + size) for start in range(0, tokens, size)]

    def _pace(self, spans: Sequence[SpanSession], *, is_pushed: bool) -> tuple[float, float]:
        """Returns the seconds of the slowest span for a chunk, and for each token of it, as far as they are known."""
        known = {entry.peer: entry for entry in self._servers.view.believed()}
        step_s = token_s = 0.0
        for span in spans:
            if (entry := known.get(span.peer)) is not None and entry.throughput > 0:
                # A server without pushes is told of a chunk once it has answered the one before.
                trip_s = 0.0 if is_pushed else entry.round_trip_s
                step_s = max(step_s, len(span.blocks) * entry.step_s + trip_s)
                token_s = max(token_s, len(span.blocks) / entry.throughput)
        return step_s + _MESSAGE_S, token_s

    # -- doing it -----------------------------------------------------------------------------------------------------

    async def _run_at_once(self, pushed: PushedSteps | None) -> SpanOutputs:
        """Runs the step without cutting it: no task is worth its while for a single token."""
        if pushed is not None:
            for span in self.spans:
                await self._tell(span, [self._inputs], pushed)
        answers: list[SpanOutputs] = []
        for stage in self._stages:
            hidden = answers[-1].hidden if answers else self._inputs.hidden
            answers.append(await self._run_chunk(stage, replace(self._inputs, hidden=hidden), self._cached, pushed))
        return chain_outputs(answers, collect_hidden=self._inputs.collect_hidden)

    async def _run_chunks(self, chunks: Sequence[SpanInputs], pushed: PushedSteps | None) -> SpanOutputs:
        loop = asyncio.get_running_loop()
        # What each span has put out, chunk by chunk.
        ways: list[list[asyncio.Future[Tensor]]] = [[loop.create_future() for _ in chunks] for _ in self._stages]
        running = [
            asyncio.create_task(self._run_stage(stage, chunks, before, after, pushed), name="chunks of a span")
            for stage, before, after in zip(self._stages, [None, *ways], ways, strict=False)
        ]
        telling = [
            asyncio.create_task(self._tell(stage[0], chunks, pushed), name="tell of chunks")
            for stage in (self._stages if pushed is not None else ())
            if pushed is not None
        ]
        try:
            answers = await asyncio.gather(*running)
        finally:
            for task in (*running, *telling):
                task.cancel()
            await asyncio.gather(*running, *telling, return_exceptions=True)
        return chain_outputs(answers, collect_hidden=self._inputs.collect_hidden)

    async def _run_stage(
        self,
        stage: list[SpanSession],
        chunks: Sequence[SpanInputs],
        before: Sequence[asyncio.Future[Tensor]] | None,
        after: Sequence[asyncio.Future[Tensor]],
        pushed: PushedSteps | None,
    ) -> SpanOutputs:
        """Runs the chunks on one span, each when the span before has put it out."""
        answers: list[SpanOutputs] = []
        cached = self._cached
        for index, chunk in enumerate(chunks):
            hidden = chunk.hidden if before is None else await before[index]
            answers.append(await self._run_chunk(stage, replace(chunk, hidden=hidden), cached, pushed))
            after[index].set_result(answers[-1].hidden)
            cached += hidden.shape[1]
        check_same_routers(answers, "the chain")
        return join_outputs(answers, dim=1)

    async def _run_chunk(
        self, stage: list[SpanSession], chunk: SpanInputs, cached: int, pushed: PushedSteps | None
    ) -> SpanOutputs:
        """Runs a chunk on one span, or on those that take its place."""
        retries = self._retries
        answers: list[SpanOutputs] = []
        while (position := len(answers)) < len(stage):
            current = stage[position]
            if current.is_lost:
                stage[position : position + 1] = await self._steps.moved(current, self._demand(current), retries)
                continue
            hidden = answers[-1].hidden if answers else chunk.hidden
            try:
                answers.append(await self._advance(current, replace(chunk, hidden=hidden), pushed))
                retries.progressed()
            except PostedInVainError:
                continue  # by this client then, after a replay if the session was closed
            except SwarmError as exc:
                if pushed is not None:
                    pushed.give_up(current)
                await current.close()
                # Some parts of a long input may have gone through.
                current.crop(cached)
                retries.note(current.peer, exc)
                if not current.is_lost:
                    # It was empty: a fresh plan for its blocks is enough.
                    parts = await self._steps.plan(current.blocks, self._demand(current), current.history, retries)
                    stage[position : position + 1] = parts
        return chain_outputs(answers, collect_hidden=self._inputs.collect_hidden)

    async def _advance(self, current: SpanSession, chunk: SpanInputs, pushed: PushedSteps | None) -> SpanOutputs:
        rows, tokens = self._inputs.hidden.shape[:2]
        if current.channel is None:
            await self._steps.open(current, batch_size=rows)
        if tokens > 1:
            current.check_room(rows, self._cached + tokens - current.history.length)
        if pushed is not None:
            started = time.perf_counter()
            if (found := await pushed.collect(current, chunk.hidden)) is not None:
                return await self._steps.finish(current, replace(chunk, blocks=current.blocks), *found, started)
        return await self._steps.advance(current, chunk)

    async def _tell(self, current: SpanSession, chunks: Sequence[SpanInputs], pushed: PushedSteps) -> None:
        """Tells a server of chunks ahead of their inputs."""
        cached = self._cached
        for index, chunk in enumerate(chunks):
            ahead = cached - current.history.length
            part, receivers = replace(chunk, blocks=current.blocks), pushed.receivers(current)
            named = self._steps.request(current, part, ahead=ahead, receivers=receivers)
            if not await pushed.post(current, named, is_last=index == len(chunks) - 1):
                return
            cached += chunk.hidden.shape[1]

    def _demand(self, current: SpanSession) -> Demand:
        """Returns what those have to do that take the place of one span."""
        rows, tokens = self._inputs.hidden.shape[:2]
        sender, receiver = neighbors(self.spans, current)
        return Demand(tokens=rows * tokens, kv_tokens=rows * (self._cached + tokens), sender=sender, receiver=receiver)


def num_chunks(num_spans: int, tokens: int, step_s: float, token_s: float) -> int:
    """Returns into how many chunks to cut a prompt so that it is soon through spans of one speed.

    With C chunks, N spans are through after C + N - 1 times of one chunk, which takes ``step_s`` and ``token_s`` for
    each of its tokens. Of all numbers that come near the least time, the smallest is taken: each chunk makes servers
    read their weights again.
    """
    seconds = [(count + num_spans - 1) * (step_s + tokens * token_s / count) for count in range(1, _MAX_CHUNKS + 1)]
    return next(count for count, one in enumerate(seconds, 1) if one <= _NEAR_BEST * min(seconds))
