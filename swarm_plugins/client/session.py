"""One generation stream over a chain: a session on every server, queued cache changes, replay on failure.

The client keeps what it has sent to each span. When a server is lost, another one gets the same inputs again, so the
tokens that follow are the same as without the loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from swarm_plugins.block_io import CacheOp, LoadedAdapter, SpanInputs, SpanOutputs, chain_outputs, join_outputs
from swarm_plugins.client.answers import check_outputs, check_same_routers
from swarm_plugins.client.history import History
from swarm_plugins.client.observer import SentSession, StepCall
from swarm_plugins.client.pushing import OtherInputError, PushedStep, is_worth_it, may_push
from swarm_plugins.client.retries import ChainRetries
from swarm_plugins.client.span_session import SpanSession
from swarm_plugins.client.splitting import tokens_per_message
from swarm_plugins.errors import SwarmError, UnknownAdapterError
from swarm_plugins.routing import Demand, SpanChoice
from swarm_plugins.transport.messages import (
    Message,
    SessionOpen,
    SessionOpened,
    SessionStep,
    SessionStepResponse,
)

if TYPE_CHECKING:
    from swarm_plugins.client.discovery.view import Servers

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


class ClientSession:
    """A KV cache that lives on the servers of one chain; raises like `ChainCall`."""

    def __init__(self, servers: Servers, *, blocks: range, prefix: Sequence[Tensor] = ()) -> None:
        self.servers = servers
        self.blocks = blocks
        self.prefix = tuple(tensor.detach() for tensor in prefix)
        """Keys and values the cache starts with, K then V for each block."""
        self._spans: list[SpanSession] = []

    async def step(self, inputs: SpanInputs, ops: Sequence[CacheOp] = ()) -> SpanOutputs:
        """Applies queued cache changes, then runs new tokens through the chain.

        If it raises, the changes stay in the cache and the new tokens do not: the step can be tried again.
        """
        self._apply(ops)
        retries = ChainRetries(self.servers.view)
        if not self._spans:
            self._spans = await self._plan(self.blocks, inputs, History(self.prefix), retries)
        cached = self._spans[0].history.length
        try:
            outputs = await self._run(inputs, cached, retries)
        except BaseException:
            # Also when interrupted: the first spans may already have the new tokens.
            for current in self._spans:
                current.crop(cached)
            raise
        await self._leave_slow(inputs)
        return outputs

    def _apply(self, ops: Sequence[CacheOp]) -> None:
        for current in self._spans:
            current.apply(ops)
        if not self._spans:
            # Nothing has run yet, or the first step failed: there is only a prefix to change.
            start = History(self.prefix)
            for op in ops:
                start.apply(op)
            self.prefix = start.prefix

    async def _run(self, inputs: SpanInputs, cached: int, retries: ChainRetries) -> SpanOutputs:
        pushed = PushedStep(self.servers.peers, self.servers.hops)
        try:
            await self._post(inputs, pushed)
            return await self._collect(inputs, cached, retries, pushed)
        finally:
            await pushed.close()

    async def _post(self, inputs: SpanInputs, pushed: PushedStep) -> None:
        """Sends a step to all servers at once, if each can get its input from the one before."""
        peers, spans = self.servers.peers, self._spans
        if not self._pushes():
            return
        await asyncio.gather(*(self._open_ahead(current, inputs) for current in spans))
        tokens = inputs.hidden.shape[1]
        parts = [replace(inputs, blocks=current.blocks) for current in spans]
        fits = all(tokens <= self._tokens_at_once(current, part) for current, part in zip(spans, parts, strict=True))
        if not fits or not may_push(spans, self.servers.hops):
            return
        with contextlib.suppress(SwarmError):  # it will show at that server's turn
            requests = []
            for current, part in zip(spans, parts, strict=True):
                requests.append(self._request(current, part))
                await peers.upload(current.peer, requests[-1][1])
            await pushed.post(spans, requests)

    def _pushes(self) -> bool:
        """Returns whether servers that can are to push."""
        peers, spans = self.servers.peers, self._spans
        if len(spans) < 2 or not all(self._takes_pushes(current) for current in spans):
            return False
        return peers.config.push == "on" or is_worth_it([peers.paces.round_trip_s(one.peer) for one in spans])

    def _takes_pushes(self, current: SpanSession) -> bool:
        info = self.servers.view.known.infos.get(current.peer)
        return self.servers.peers.config.push != "off" and info is not None and info.pushes

    async def _open_ahead(self, current: SpanSession, inputs: SpanInputs) -> None:
        if current.channel is None and not current.is_lost:
            try:
                await self._open(current, batch_size=inputs.hidden.shape[0])
            except SwarmError:
                await current.close()  # it is opened again at its turn, and the error shows there

    async def _collect(self, inputs: SpanInputs, cached: int, retries: ChainRetries, pushed: PushedStep) -> SpanOutputs:
        answers: list[SpanOutputs] = []
        while (position := len(answers)) < len(self._spans):
            current = self._spans[position]
            if current.is_lost:
                self._spans[position : position + 1] = await self._moved(current, inputs, retries)
                continue
            hidden = answers[-1].hidden if answers else inputs.hidden
            try:
                answers.append(await self._advance(current, replace(inputs, hidden=hidden), pushed))
                retries.progressed()
            except OtherInputError:
                continue  # its session is replayed, by this client
            except SwarmError as exc:
                await current.close()
                # Some chunks of a long input may have gone through.
                current.crop(cached)
                retries.note(current.peer, exc)
                if not current.is_lost:
                    # It was empty: a fresh plan for its blocks is enough.
                    parts = await self._plan(current.blocks, inputs, current.history, retries)
                    self._spans[position : position + 1] = parts
        retries.succeeded()
        return chain_outputs(answers, collect_hidden=inputs.collect_hidden)

    async def _plan(
        self, blocks: range, inputs: SpanInputs, history: History, retries: ChainRetries
    ) -> list[SpanSession]:
        """Plans sessions with room for a history and the new tokens; they start with the history's prefix."""
        batch, tokens = inputs.hidden.shape[:2]
        demand = Demand(tokens=batch * tokens, kv_tokens=batch * (history.length + tokens))
        return _parts(await retries.chain(blocks, demand), blocks, history)

    async def _moved(self, lost: SpanSession, inputs: SpanInputs, retries: ChainRetries) -> list[SpanSession]:
        """Replays a lost server's history on others."""
        while True:
            parts = await self._plan(lost.blocks, inputs, lost.history, retries)
            failure = await self._replay(parts, lost.history)
            if failure is None:
                return parts
            retries.note(*failure)

    async def _replay(self, parts: Sequence[SpanSession], history: History) -> tuple[str, SwarmError] | None:
        """Sends a history to new sessions; if that fails, closes them and returns where and why."""
        running = parts[0]
        try:
            for sent in history.merged():
                hidden = sent.hidden
                for running in parts:
                    hidden = (await self._advance(running, replace(sent, hidden=hidden))).hidden
        except BaseException as exc:
            for part in parts:
                await part.close()
            if not isinstance(exc, SwarmError):
                raise
            return running.peer, exc
        return None

    async def _leave_slow(self, inputs: SpanInputs) -> None:
        """Moves the session on a server that has become slow to clearly faster ones, if there are any."""
        view, rows = self.servers.view, inputs.hidden.shape[0]
        due = [current for current in self._spans if current.is_due]
        if due and view.is_stale:
            # No token waits for servers to say what they serve now: the next comparison knows.
            view.refresh_in_background()
            return
        for current in due:
            length = current.history.length
            demand = Demand(tokens=rows, kv_tokens=rows * (length + 1))
            found = view.alternative(current.blocks, demand, Demand(tokens=rows * length), without={current.peer})
            if found is None or not current.times.is_move_worth(found.step_s, found.replay_s):
                continue
            log.info("server %s has become slow: its session moves to %s", current.peer, found.chain)
            parts = _parts(found.chain, current.blocks, current.history)
            failure = await self._replay(parts, current.history)
            if failure is not None:
                view.ban(*failure)
                current.times.postpone()
                continue
            position = self._spans.index(current)
            self._spans[position : position + 1] = parts
            await current.close()

    async def _advance(self, current: SpanSession, inputs: SpanInputs, pushed: PushedStep | None = None) -> SpanOutputs:
        """Runs new tokens on one span, in chunks small enough for the server."""
        inputs = replace(inputs, blocks=current.blocks)
        rows, tokens = inputs.hidden.shape[:2]
        if pushed is not None and pushed.is_waiting(current):
            try:
                return await self._send(current, inputs, pushed)
            except UnknownAdapterError:
                pass  # the server has dropped it since: it is uploaded, and the step sent, again
        if current.channel is None:
            await self._open(current, batch_size=rows)
        if tokens == 1:
            return await self._send(current, inputs)
        current.check_room(rows, tokens)
        size = self._tokens_at_once(current, inputs)
        starts = range(0, tokens, size)
        answers = [await self._send(current, inputs.take_tokens(start, start + size)) for start in starts]
        check_same_routers(answers, f"server {current.peer}")
        return join_outputs(answers, dim=1)

    def _tokens_at_once(self, current: SpanSession, inputs: SpanInputs) -> int:
        """Returns how many tokens of each row go in one message."""
        info = self.servers.view.known.infos.get(current.peer)
        limit = tokens_per_message(inputs)
        if info is not None and info.max_batch_tokens > 0:
            limit = min(limit, info.max_batch_tokens)
        return max(1, limit // inputs.hidden.shape[0])

    async def _open(self, current: SpanSession, *, batch_size: int, fork_of: str | None = None) -> None:
        peers = self.servers.peers
        current.channel = await peers.open(current.peer, "rpc_session")
        current.unsent_ops = []
        request = SessionOpen(
            version=self.servers.view.version.key,
            start=current.blocks.start,
            end=current.blocks.stop,
            batch_size=batch_size,
            fork_of=fork_of,
            prefix=() if fork_of else current.history.prefix,
            pushes=self._takes_pushes(current),
        )
        # Copying takes time: the prefix, or all tokens of the session to fork.
        tokens = max(1, batch_size * current.history.length) if request.prefix or fork_of else 1
        opened = await current.ask(peers, request, SessionOpened, work="open session", units=tokens)
        current.name, current.room = opened.session, (batch_size, opened.max_tokens)
        current.push_key, current.num_steps = opened.push_key, 0
        current.sent = None if fork_of else SentSession(request)

    def _request(self, current: SpanSession, inputs: SpanInputs) -> tuple[SessionStep, tuple[LoadedAdapter, ...]]:
        """Returns the message for new tokens, and the adapters that it names."""
        # Nothing trains between the tokens of a generation, but a prompt may follow a training step.
        is_prompt = inputs.hidden.shape[1] > 1 or current.history.length == 0
        part = self.servers.digests.part(inputs.adapters, current.blocks, verify=is_prompt)
        request = SessionStep(
            hidden=inputs.hidden.detach(),
            cached_tokens=current.history.length,
            position_ids=inputs.position_ids,
            attention_mask=inputs.attention_mask,
            ops=tuple(current.unsent_ops),
            adapters=part.digests,
            adapter_rows=part.rows,
            collect_hidden=inputs.collect_hidden,
            collect_router=inputs.collect_router,
            reply_codec=self.servers.peers.config.codec,
            nonce=self.servers.view.observer.nonce(),
        )
        return request, part.shipped

    async def _send(self, current: SpanSession, inputs: SpanInputs, pushed: PushedStep | None = None) -> SpanOutputs:
        """Sends new tokens to one server, unless it has been told of them, and returns its answer."""
        peers, view = self.servers.peers, self.servers.view
        started = time.perf_counter()
        if pushed is None:
            request, adapters = self._request(current, inputs)
            units, codec = inputs.num_tokens, peers.config.codec
            response = await peers.with_adapters(
                current.peer,
                adapters,
                lambda: current.ask(peers, request, SessionStepResponse, work="rpc_session", units=units, codec=codec),
            )
        else:
            request, adapters, response = await pushed.collect(current, inputs.hidden)
        check_outputs(response, inputs, current.peer)
        current.note_sent(request)
        current.unsent_ops = []
        current.is_due = inputs.hidden.shape[1] == 1 and current.times.add(time.perf_counter() - started)
        current.history.append(inputs)
        await view.observer.step_done(
            StepCall(
                peer=current.peer,
                info=view.known.infos.get(current.peer),
                history=current.history,
                sent=current.sent,
                adapters=adapters,
                request=request,
                response=response,
            )
        )
        return response

    async def fork(self) -> ClientSession:
        """Returns an independent session with the same cache; servers copy theirs."""
        other = ClientSession(self.servers, blocks=self.blocks, prefix=self.prefix)
        try:
            for current in self._spans:
                twin = SpanSession(current.peer, current.blocks, current.history.copy())
                other._spans.append(twin)
                if current.channel is not None and current.history.length:
                    # If the copy fails, the twin replays its history at its first step.
                    try:
                        await self._open(twin, batch_size=current.history.batch_size, fork_of=current.name)
                        twin.unsent_ops = list(current.unsent_ops)
                    except SwarmError:
                        await twin.close()
        except BaseException:
            # Interrupted: nothing will ever close the copies made so far.
            await other.close()
            raise
        return other

    async def close(self) -> None:
        """Closes the sessions on all servers. Idempotent."""
        spans, self._spans = self._spans, []
        for current in spans:
            await current.close()


def _parts(chain: Sequence[SpanChoice], blocks: range, history: History) -> list[SpanSession]:
    """Returns sessions to open for the parts of some blocks, with their parts of the history's prefix."""
    return [
        SpanSession(
            peer, range(start, end), History(history.prefix[2 * (start - blocks.start) : 2 * (end - blocks.start)])
        )
        for peer, start, end in chain
    ]
