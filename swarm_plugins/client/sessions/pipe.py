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

from swarm_plugins.block_io import SpanInputs, SpanOutputs, chain_outputs, join_outputs, page_size
from swarm_plugins.client.answers import check_same_routers
from swarm_plugins.client.calls.pushing import SentInVainError, Told, close_all, is_pushing, tell
from swarm_plugins.client.sessions.replacing import moved, neighbors, planned
from swarm_plugins.client.sessions.span import SpanSession, StepCall
from swarm_plugins.client.splitting import check_whole
from swarm_plugins.errors import SwarmError
from swarm_plugins.routing import Demand
from swarm_plugins.transport.messages import SessionStep, SessionStepResponse

if TYPE_CHECKING:
    from swarm_plugins.client.calls.retries import ChainRetries
    from swarm_plugins.client.servers import Servers

_LEAST_TOKENS = 128
"""Of all rows in one chunk: most of a smaller one's time is reading weights, and a mixture reads all of its experts."""
_MAX_CHUNKS = 16
_NEAR_BEST = 1.05
_MESSAGE_S = 0.005
"""What a message takes beyond computing."""


class _Stage:
    """One span of a chain during a step: a session, or those that have taken its place.

    Args:
        span: The session.
    """

    def __init__(self, span: SpanSession) -> None:
        self.spans = [span]
        self.calls: list[StepCall] = []
        """By chunk: what the server is told of ahead; empty if nothing, or no more."""
        self.told: list[Told[SessionStep, SessionStepResponse]] = []
        """The same."""
        self.telling: asyncio.Task[None] | None = None

    def give_up(self) -> None:
        """Tells the server of nothing more."""
        if self.telling is not None:
            self.telling.cancel()
        for told in self.told:
            told.give_up()
        self.calls = []


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
        self._stages = [_Stage(span) for span in spans]
        self._inputs = inputs
        self._cached = cached
        self._retries = retries

    @property
    def spans(self) -> list[SpanSession]:
        """The sessions that hold the step now, in the order of their blocks."""
        return [span for stage in self._stages for span in stage.spans]

    async def run(self) -> SpanOutputs:
        """Runs the step; raises like `ChainCall`."""
        is_pushed = await self._is_pushed()
        chunks = self._chunks(is_pushed=is_pushed)
        if is_pushed:
            self._prepare(chunks)
        told = [one for stage in self._stages for one in stage.told]
        try:
            if len(chunks) == 1:
                return await self._run_at_once()
            return await self._run_chunks(chunks)
        finally:
            await close_all([], told)

    # -- what to do ---------------------------------------------------------------------------------------------------

    async def _is_pushed(self) -> bool:
        """Opens the sessions; returns whether each server is to get its input from the one before."""
        spans = self.spans
        if len(spans) < 2:
            return False
        if any(span.channel is None for span in spans):
            rows = self._inputs.hidden.shape[0]
            await asyncio.gather(*(span.open_ahead(rows) for span in spans))
        are_ready = all(span.channel is not None for span in spans) and all(span.push_key for span in spans[1:])
        return is_pushing(self._servers.peers, [span.peer for span in spans]) and are_ready

    def _chunks(self, *, is_pushed: bool) -> list[SpanInputs]:
        """Cuts the new tokens so that the prompt is through soonest."""
        rows, tokens = self._inputs.hidden.shape[:2]
        if tokens == 1:
            return [self._inputs]
        spans, least, limit = self.spans, 1, tokens
        owns = [span.own(self._inputs) for span in spans]
        for own in owns:
            check_whole(own, self._cached)
        if is_pushed:
            limit = min(span.tokens_at_once(self._inputs) for span in spans)
            least = math.ceil(tokens / limit)
        most = rows * tokens // _LEAST_TOKENS
        if len(spans) > 1 and most > 1:
            step_s, token_s = self._pace(spans, is_pushed=is_pushed)
            least = max(least, min(num_chunks(len(spans), rows * tokens, step_s, token_s), most))
        if least == 1:
            return [self._inputs]
        inputs = replace(self._inputs, has_states=any(own.has_states for own in owns))
        return inputs.cut_tokens(page_size(math.ceil(tokens / least), limit), self._cached)

    def _prepare(self, chunks: Sequence[SpanInputs]) -> None:
        """Makes the calls that servers are told of ahead: each gets its input from the server before."""
        before: _Stage | None = None
        for stage in self._stages:
            [span] = stage.spans
            cached, sender = self._cached, "" if before is None else before.spans[0].peer
            for index, chunk in enumerate(chunks):
                call = StepCall(self._servers, span, replace(chunk, blocks=span.blocks), cached)
                slot = span.slot(index, chunk.hidden.nbytes)
                told = Told(self._servers.peers, self._servers.view, call, span.peer, slot, sender=sender)
                call.told = told
                if before is not None:
                    before.calls[index].next = told
                stage.calls.append(call)
                stage.told.append(told)
                cached += chunk.hidden.shape[1]
            before = stage

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

    async def _run_at_once(self) -> SpanOutputs:
        """Runs the step without cutting it: no task is worth its while for a single token."""
        for told in (one for stage in self._stages for one in stage.told):
            if not await told.post():
                told.give_up()
        answers: list[SpanOutputs] = []
        for stage in self._stages:
            hidden = answers[-1].hidden if answers else self._inputs.hidden
            answers.append(await self._run_chunk(stage, 0, replace(self._inputs, hidden=hidden), self._cached))
        return chain_outputs(answers, collect_hidden=self._inputs.collect_hidden)

    async def _run_chunks(self, chunks: Sequence[SpanInputs]) -> SpanOutputs:
        loop = asyncio.get_running_loop()
        # What each span has put out, chunk by chunk.
        ways: list[list[asyncio.Future[Tensor]]] = [[loop.create_future() for _ in chunks] for _ in self._stages]
        for stage in self._stages:
            stage.telling = asyncio.create_task(tell(stage.told), name="tell of chunks")
        running = [
            asyncio.create_task(self._run_stage(stage, chunks, before, after), name="chunks of a span")
            for stage, before, after in zip(self._stages, [None, *ways], ways, strict=False)
        ]
        tasks = [*running, *(stage.telling for stage in self._stages if stage.telling is not None)]
        try:
            answers = await asyncio.gather(*running)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return chain_outputs(answers, collect_hidden=self._inputs.collect_hidden)

    async def _run_stage(
        self,
        stage: _Stage,
        chunks: Sequence[SpanInputs],
        before: Sequence[asyncio.Future[Tensor]] | None,
        after: Sequence[asyncio.Future[Tensor]],
    ) -> SpanOutputs:
        """Runs the chunks on one span, each when the span before has put it out."""
        answers: list[SpanOutputs] = []
        cached = self._cached
        for index, chunk in enumerate(chunks):
            hidden = chunk.hidden if before is None else await before[index]
            answers.append(await self._run_chunk(stage, index, replace(chunk, hidden=hidden), cached))
            after[index].set_result(answers[-1].hidden)
            cached += hidden.shape[1]
        check_same_routers(answers, "the chain")
        return join_outputs(answers, dim=1)

    async def _run_chunk(self, stage: _Stage, index: int, chunk: SpanInputs, cached: int) -> SpanOutputs:
        """Runs a chunk on one span, or on those that take its place."""
        servers, retries, spans = self._servers, self._retries, stage.spans
        answers: list[SpanOutputs] = []
        while (position := len(answers)) < len(spans):
            current = spans[position]
            if current.is_lost:
                spans[position : position + 1] = await moved(servers, current, self._demand(current), retries)
                continue
            hidden = answers[-1].hidden if answers else chunk.hidden
            try:
                answers.append(await self._advance(stage, index, current, replace(chunk, hidden=hidden)))
                retries.progressed()
            except SentInVainError:
                # Then this client sends the input, after a replay if the session is closed. It is closed if the server
                # has been told of later steps, or of a part of one: what is sent now would end up inside that.
                if any(one.is_begun for one in stage.told[index + 1 :]):
                    await current.close()
                stage.give_up()
            except SwarmError as exc:
                stage.give_up()
                await current.close()
                # Some parts of a long input may have gone through.
                current.crop(cached)
                retries.note(current.peer, exc)
                if not current.is_lost:
                    # It was empty: a fresh plan for its blocks is enough.
                    parts = await planned(servers, current.blocks, self._demand(current), current.history, retries)
                    spans[position : position + 1] = parts
        return chain_outputs(answers, collect_hidden=self._inputs.collect_hidden)

    async def _advance(self, stage: _Stage, index: int, current: SpanSession, chunk: SpanInputs) -> SpanOutputs:
        rows, tokens = self._inputs.hidden.shape[:2]
        if current.channel is None:
            await current.open(rows)
        if tokens > 1:
            current.check_room(rows, self._cached + tokens - current.history.length)
        if not stage.calls:
            return await current.advance(chunk)
        call = stage.calls[index]
        call.inputs, call.started = replace(chunk, blocks=current.blocks), time.perf_counter()
        return await current.ask(call)

    def _demand(self, current: SpanSession) -> Demand:
        """Returns what those have to do that take the place of one span."""
        rows, tokens = self._inputs.hidden.shape[:2]
        sender, receiver = neighbors(self.spans, current)
        return Demand(
            tokens=rows * tokens,
            kv_tokens=rows * (self._cached + tokens),
            kv_rows=rows,
            sender=sender,
            receiver=receiver,
        )


def num_chunks(num_spans: int, tokens: int, step_s: float, token_s: float) -> int:
    """Returns into how many chunks to cut a prompt so that it is soon through spans of one speed.

    With C chunks, N spans are through after C + N - 1 times of one chunk, which takes ``step_s`` and ``token_s`` for
    each of its tokens. Of all numbers that come near the least time, the smallest is taken: each chunk makes servers
    read their weights again.
    """
    seconds = [(count + num_spans - 1) * (step_s + tokens * token_s / count) for count in range(1, _MAX_CHUNKS + 1)]
    return next(count for count, one in enumerate(seconds, 1) if one <= _NEAR_BEST * min(seconds))
