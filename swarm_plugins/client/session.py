"""One generation stream over a chain: a session on every server, changes of the cache queued, replay on failure.

The client keeps what it has sent to each span. When a server is lost, the blocks it ran are opened elsewhere and
get the same inputs again: the tokens that follow are the same as without the loss.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from swarm_plugins.client.adapters import DigestCache
from swarm_plugins.client.chain_call import BlockInputs, BlockOutputs
from swarm_plugins.client.checks import check_outputs, check_same_routers
from swarm_plugins.client.directory import SwarmView
from swarm_plugins.client.history import History, SentStep
from swarm_plugins.client.peers import Peers, check_answer, num_tokens
from swarm_plugins.client.retries import Retries
from swarm_plugins.client.splitting import tokens_per_message
from swarm_plugins.errors import CapacityError, SessionLostError, SwarmError, UnknownAdapterError
from swarm_plugins.routing import Demand, SpanChoice
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import (
    CacheOp,
    SessionOpen,
    SessionOpened,
    SessionStep,
    SessionStepResponse,
)

__all__ = ["ClientSession"]


class _SpanSession:
    """The session on one server, and what was sent to it.

    Args:
        span: Blocks and peer.
        history: What was sent.
    """

    def __init__(self, span: SpanChoice, history: History) -> None:
        self.span = span
        self.history = history
        self.channel: Channel | None = None
        self.name = ""
        self.room = (0, 0)
        """Rows it was opened with, and tokens that the server then said it holds in each."""
        self.unsent_ops: list[CacheOp] = []
        """Changes that the history has seen and the server has not."""

    @property
    def is_lost(self) -> bool:
        """Whether something was sent to a session that is no more."""
        return self.channel is None and bool(self.history.steps)

    def apply(self, ops: Sequence[CacheOp]) -> None:
        for op in ops:
            self.history.apply(op)
        if self.channel is not None:
            self.unsent_ops.extend(ops)

    def crop(self, length: int) -> None:
        """Takes back what was sent after the first ``length`` tokens."""
        if self.history.length > length:
            self.apply([CacheOp(kind="crop", indices=(length,))])

    def check_room(self, rows: int, new_tokens: int) -> None:
        """Raises before the parts of a long input are sent one by one, if the server has said they are too many.

        Raises:
            CapacityError: If there is no room.
        """
        rows_then, limit = self.room
        length = self.history.length + new_tokens
        # With other rows since then, what it said is no longer about this batch.
        if rows == rows_then and length > limit:
            raise CapacityError(
                f"server {self.span.peer} holds {limit} tokens per row at most in a session of {rows} rows, {length} "
                "are needed: shorten the prompt, use fewer rows, or serve with more room"
            )

    async def close(self) -> None:
        channel, self.channel = self.channel, None
        if channel is not None:
            with contextlib.suppress(SwarmError):
                await channel.close()


class ClientSession:
    """A KV cache that lives on the servers of one chain.

    Args:
        peers: Sends the requests.
        view: Plans the chain.
        digests: Names the adapters.
        blocks: The blocks of the chain.
        prefix: Keys and values that the cache starts with, K then V for each block.
    """

    def __init__(
        self, peers: Peers, view: SwarmView, digests: DigestCache, *, blocks: range, prefix: Sequence[Tensor] = ()
    ) -> None:
        self.peers = peers
        self.view = view
        self.digests = digests
        self.blocks = blocks
        self.prefix = tuple(tensor.detach() for tensor in prefix)
        self._spans: list[_SpanSession] = []

    async def step(self, inputs: BlockInputs, ops: Sequence[CacheOp] = ()) -> BlockOutputs:
        """Applies the queued changes of the cache, then runs new tokens through the chain.

        If it raises, the changes are in the cache and the new tokens are not: the step can be tried again.

        Raises:
            MissingBlocksError: If no living server holds some block.
            SwarmError: If a server refuses the step, or too many servers failed.
        """
        self._apply(ops)
        retries = Retries(self.view, self.peers.config.max_retries)
        if not self._spans:
            self._spans = await self._plan(self.blocks, inputs, History(self.prefix), retries)
        cached = self._spans[0].history.length
        try:
            return await self._run(inputs, cached, retries)
        except BaseException:
            # Also when interrupted: the first spans may have the new tokens already.
            for current in self._spans:
                current.crop(cached)
            raise

    def _apply(self, ops: Sequence[CacheOp]) -> None:
        for current in self._spans:
            current.apply(ops)
        if not self._spans:
            # Nothing has run yet (or the first step has failed): only the prefix is there to be changed.
            start = History(self.prefix)
            for op in ops:
                start.apply(op)
            self.prefix = start.prefix

    async def _run(self, inputs: BlockInputs, cached: int, retries: Retries) -> BlockOutputs:
        outputs = BlockOutputs(hidden=inputs.hidden)
        position = 0
        while position < len(self._spans):
            current = self._spans[position]
            if current.is_lost:
                self._spans[position : position + 1] = await self._moved(current, inputs, retries)
                continue
            try:
                response = await self._advance(current, replace(inputs, hidden=outputs.hidden))
            except SwarmError as exc:
                await current.close()
                # Some chunks of a long input may be in it.
                current.crop(cached)
                retries.note(current.span.peer, exc)
                if not current.is_lost:
                    # Nothing was in it yet: a fresh plan for the blocks is all it takes.
                    blocks = range(current.span.start, current.span.end)
                    self._spans[position : position + 1] = await self._plan(blocks, inputs, current.history, retries)
                continue
            position += 1
            outputs.hidden = response.hidden
            outputs.hidden_states.extend(response.hidden_states)
            if inputs.collect_hidden and position < len(self._spans):
                outputs.hidden_states.append(response.hidden)
            outputs.router_logits.extend(response.router_logits)
            outputs.router_blocks.extend(response.router_blocks)
        retries.succeeded()
        return outputs

    async def _plan(self, blocks: range, inputs: BlockInputs, history: History, retries: Retries) -> list[_SpanSession]:
        """Plans sessions that start with the history's prefix, with room for all of it and the new tokens."""
        batch, tokens = inputs.hidden.shape[:2]
        demand = Demand(tokens=batch * tokens, kv_tokens=batch * (history.length + tokens))
        chain, prefix = await retries.chain(blocks, demand), history.prefix
        return [
            _SpanSession(span, History(prefix[2 * (span.start - blocks.start) : 2 * (span.end - blocks.start)]))
            for span in chain
        ]

    async def _moved(self, lost: _SpanSession, inputs: BlockInputs, retries: Retries) -> list[_SpanSession]:
        """Opens the blocks of a lost server elsewhere and replays what was sent to it."""
        while True:
            blocks = range(lost.span.start, lost.span.end)
            parts = await self._plan(blocks, inputs, lost.history, retries)
            running = parts[0]
            try:
                for sent in lost.history.merged():
                    hidden = sent.hidden
                    for running in parts:
                        hidden = (await self._advance(running, _as_inputs(sent, hidden))).hidden
            except BaseException as exc:
                for part in parts:
                    await part.close()
                if not isinstance(exc, SwarmError):
                    raise
                retries.note(running.span.peer, exc)
                continue
            return parts

    async def _advance(self, current: _SpanSession, inputs: BlockInputs) -> SessionStepResponse:
        """Runs new tokens on one span, cut along the sequence where the server allows fewer at once."""
        if current.channel is None:
            await self._open(current, batch_size=inputs.hidden.shape[0])
        if inputs.hidden.shape[1] > 1:
            current.check_room(*inputs.hidden.shape[:2])
        info = self.view.infos.get(current.span.peer)
        limit = info.max_batch_tokens if info is not None and info.max_batch_tokens > 0 else inputs.hidden.numel()
        if inputs.hidden.shape[1] > 1:
            limit = min(limit, tokens_per_message(inputs, current.span.end - current.span.start))
        chunk = max(1, limit // inputs.hidden.shape[0])
        if inputs.hidden.shape[1] <= chunk:
            return await self._send(current, inputs)
        whole = _as_sent(inputs, current.history.length)
        cached = current.history.length
        starts = range(0, inputs.hidden.shape[1], chunk)
        answers = [await self._send(current, _chunk(whole, inputs, s, s + chunk, cached)) for s in starts]
        check_same_routers(answers, f"server {current.span.peer}")
        return _joined(answers)

    async def _open(self, current: _SpanSession, *, batch_size: int, fork_of: str | None = None) -> None:
        span, config = current.span, self.peers.config
        current.channel = await self.peers.transport.open(span.peer, "rpc_session", timeout_s=config.connect_timeout_s)
        current.unsent_ops = []
        request = SessionOpen(
            version=self.view.version.key,
            start=span.start,
            end=span.end,
            batch_size=batch_size,
            fork_of=fork_of,
            prefix=() if fork_of else current.history.prefix,
        )
        # What has to be copied takes time: the prefix, or all tokens of the session to fork.
        tokens = max(1, batch_size * current.history.length) if request.prefix or fork_of else 1
        deadlines, started = self.peers.deadlines, time.perf_counter()
        await current.channel.send(request)
        answer = await current.channel.receive(timeout_s=deadlines.timeout_s(span.peer, "open session", tokens))
        opened = check_answer(answer, SessionOpened, span.peer)
        deadlines.observe(span.peer, "open session", tokens, time.perf_counter() - started)
        current.name, current.room = opened.session, (batch_size, opened.max_tokens)

    async def _send(self, current: _SpanSession, inputs: BlockInputs) -> SessionStepResponse:
        span = current.span
        # Nothing trains between the tokens of a generation; a prompt may follow a step of training.
        is_prompt = inputs.hidden.shape[1] > 1 or current.history.length == 0
        part = self.digests.part(inputs.adapters, range(span.start, span.end), verify=is_prompt)
        await self.peers.upload(span.peer, part.shipped)
        sent = _as_sent(inputs, current.history.length)
        request = SessionStep(
            hidden=sent.hidden,
            cached_tokens=current.history.length,
            position_ids=inputs.position_ids,
            attention_mask=inputs.attention_mask,
            ops=tuple(current.unsent_ops),
            adapters=part.digests,
            adapter_rows=part.rows,
            collect_hidden=inputs.collect_hidden,
            collect_router=inputs.collect_router,
            reply_codec=self.peers.config.codec,
        )
        try:
            response = await self._exchange(current, request)
        except UnknownAdapterError:
            # The server has dropped it to make room since: once more, then the error is real.
            await self.peers.upload(span.peer, part.shipped, again=True)
            response = await self._exchange(current, request)
        check_outputs(response, span, sent.hidden, collect_hidden=inputs.collect_hidden)
        current.unsent_ops = []
        current.history.steps.append(sent)
        return response

    async def _exchange(self, current: _SpanSession, request: SessionStep) -> SessionStepResponse:
        channel = current.channel
        if channel is None:
            raise SessionLostError(f"the session on server {current.span.peer} is closed")
        peer, tokens, deadlines = current.span.peer, num_tokens(request), self.peers.deadlines
        started = time.perf_counter()
        try:
            await channel.send(request, codec=self.peers.config.codec)
            answer = await channel.receive(timeout_s=deadlines.timeout_s(peer, "rpc_session", tokens))
        except BaseException:
            # Also when interrupted: an answer may be on its way that would be taken for the next one's.
            await current.close()
            raise
        response = check_answer(answer, SessionStepResponse, peer)
        # Only of work done: a refusal comes at once and says nothing of the server's pace.
        deadlines.observe(peer, "rpc_session", tokens, time.perf_counter() - started)
        return response

    async def fork(self) -> ClientSession:
        """Returns an independent session with the same cache; servers copy theirs."""
        other = ClientSession(self.peers, self.view, self.digests, blocks=self.blocks, prefix=self.prefix)
        for current in self._spans:
            twin = _SpanSession(current.span, current.history.copy())
            if current.channel is not None and current.history.length:
                # A copy that fails is no loss: the twin replays its history at its first step.
                try:
                    await self._open(twin, batch_size=current.history.batch_size, fork_of=current.name)
                    twin.unsent_ops = list(current.unsent_ops)
                except SwarmError:
                    await twin.close()
            other._spans.append(twin)
        return other

    async def close(self) -> None:
        """Closes the sessions on all servers. Idempotent."""
        spans, self._spans = self._spans, []
        for current in spans:
            await current.close()


def _as_sent(inputs: BlockInputs, cached: int) -> SentStep:
    tokens = inputs.hidden.shape[1]
    positions = inputs.position_ids
    if positions is None:
        positions = torch.arange(cached, cached + tokens)[None]  # [1, S]
    return SentStep(
        hidden=inputs.hidden.detach(),
        position_ids=positions,
        attention_mask=inputs.attention_mask,
        adapters=inputs.adapters,
    )


def _as_inputs(sent: SentStep, hidden: Tensor) -> BlockInputs:
    return BlockInputs(
        hidden=hidden, position_ids=sent.position_ids, attention_mask=sent.attention_mask, adapters=sent.adapters
    )


def _chunk(whole: SentStep, inputs: BlockInputs, start: int, end: int, cached: int) -> BlockInputs:
    mask = whole.attention_mask
    return replace(
        inputs,
        hidden=whole.hidden[:, start:end],
        position_ids=whole.position_ids[:, start:end],
        attention_mask=None if mask is None else mask[:, : cached + end],
    )


def _joined(answers: Sequence[SessionStepResponse]) -> SessionStepResponse:
    """Joins the answers to the chunks of one prefill along the sequence."""
    batch = answers[0].hidden.shape[0]
    return SessionStepResponse(
        hidden=torch.cat([answer.hidden for answer in answers], dim=1),
        hidden_states=tuple(torch.cat(s, dim=1) for s in zip(*(a.hidden_states for a in answers), strict=True)),
        router_logits=tuple(
            # [B * chunk, experts] -> [B, chunk, experts] -> [B * S, experts]
            torch.cat([logits.unflatten(0, (batch, -1)) for logits in same_block], dim=1).flatten(0, 1)
            for same_block in zip(*(answer.router_logits for answer in answers), strict=True)
        ),
        router_blocks=answers[0].router_blocks,
    )
