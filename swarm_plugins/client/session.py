"""One generation stream over a chain: a session on every server, queued cache changes, replay on failure.

The client keeps what it has sent to each span. When a server is lost, another one gets the same inputs again, so the
tokens that follow are the same as without the loss.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from swarm_plugins.block_io import CacheOp, SpanInputs, SpanOutputs, chain_outputs, join_outputs
from swarm_plugins.client.answers import check_outputs, check_same_routers
from swarm_plugins.client.history import History
from swarm_plugins.client.observer import SentSession, StepCall
from swarm_plugins.client.paces import StepTimes
from swarm_plugins.client.retries import ChainRetries
from swarm_plugins.client.splitting import tokens_per_message
from swarm_plugins.errors import CapacityError, SessionLostError, SwarmError, UnknownAdapterError
from swarm_plugins.routing import Demand, SpanChoice
from swarm_plugins.transport.messages import (
    Codec,
    Message,
    SessionOpen,
    SessionOpened,
    SessionStep,
    SessionStepResponse,
)

if TYPE_CHECKING:
    from swarm_plugins.client.discovery.view import Servers
    from swarm_plugins.client.peers import Peers
    from swarm_plugins.transport.channel import Channel

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


class _SpanSession:
    """The session on one server, and what was sent to it."""

    def __init__(self, peer: str, blocks: range, history: History) -> None:
        self.peer = peer
        self.blocks = blocks
        self.history = history
        self.channel: Channel | None = None
        self.name = ""
        self.room = (0, 0)
        """Rows it was opened with, and how many tokens per row the server then promised to hold."""
        self.times = StepTimes()
        self.unsent_ops: list[CacheOp] = []
        """Changes already in the history, but not on the server."""
        self.sent: SentSession | None = None
        """What the history has come from, as far as receipts may name it."""
        self.is_due = False
        """Whether it is time to look for a faster server."""

    @property
    def is_lost(self) -> bool:
        """Whether the session ended after something was sent to it."""
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

    def note_sent(self, request: SessionStep) -> None:
        """Records a step that was answered; a change of the cache ends the record, as does a step without a receipt."""
        if self.sent is not None and request.nonce and not request.ops:
            self.sent.steps.append(request)
        else:
            self.sent = None

    def check_room(self, rows: int, new_tokens: int) -> None:
        """Raises CapacityError before a long input is sent in parts, if the server has promised less room."""
        rows_then, limit = self.room
        length = self.history.length + new_tokens
        # The promise holds for this number of rows only.
        if rows == rows_then and length > limit:
            raise CapacityError(
                f"server {self.peer} holds {limit} tokens per row at most in a session of {rows} rows, {length} "
                "are needed: shorten the prompt, use fewer rows, or serve with more room"
            )

    async def ask(
        self, peers: Peers, request: Message, kind: type[M], *, work: str, units: int, codec: Codec = "none"
    ) -> M:
        """Sends one message over the session's stream and returns the answer."""
        if self.channel is None:
            raise SessionLostError(f"the session on server {self.peer} is closed")
        try:
            blocks = len(self.blocks) if kind is SessionStepResponse else 0
            return await peers.exchange(self.channel, request, kind, work=work, units=units, blocks=blocks, codec=codec)
        except UnknownAdapterError:
            raise  # the stream lives on
        except BaseException:
            # Also when interrupted: a late answer would be taken for the next one.
            await self.close()
            raise

    async def close(self) -> None:
        channel, self.channel = self.channel, None
        if channel is not None:
            with contextlib.suppress(SwarmError):
                await channel.close()


class ClientSession:
    """A KV cache that lives on the servers of one chain; raises like `ChainCall`."""

    def __init__(self, servers: Servers, *, blocks: range, prefix: Sequence[Tensor] = ()) -> None:
        self.servers = servers
        self.blocks = blocks
        self.prefix = tuple(tensor.detach() for tensor in prefix)
        """Keys and values the cache starts with, K then V for each block."""
        self._spans: list[_SpanSession] = []

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
        answers: list[SpanOutputs] = []
        while (position := len(answers)) < len(self._spans):
            current = self._spans[position]
            if current.is_lost:
                self._spans[position : position + 1] = await self._moved(current, inputs, retries)
                continue
            hidden = answers[-1].hidden if answers else inputs.hidden
            try:
                answers.append(await self._advance(current, replace(inputs, hidden=hidden)))
                retries.progressed()
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
    ) -> list[_SpanSession]:
        """Plans sessions with room for a history and the new tokens; they start with the history's prefix."""
        batch, tokens = inputs.hidden.shape[:2]
        demand = Demand(tokens=batch * tokens, kv_tokens=batch * (history.length + tokens))
        return _parts(await retries.chain(blocks, demand), blocks, history)

    async def _moved(self, lost: _SpanSession, inputs: SpanInputs, retries: ChainRetries) -> list[_SpanSession]:
        """Replays a lost server's history on others."""
        while True:
            parts = await self._plan(lost.blocks, inputs, lost.history, retries)
            failure = await self._replay(parts, lost.history)
            if failure is None:
                return parts
            retries.note(*failure)

    async def _replay(self, parts: Sequence[_SpanSession], history: History) -> tuple[str, SwarmError] | None:
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

    async def _advance(self, current: _SpanSession, inputs: SpanInputs) -> SpanOutputs:
        """Runs new tokens on one span, in chunks small enough for the server."""
        inputs = replace(inputs, blocks=current.blocks)
        rows, tokens = inputs.hidden.shape[:2]
        if current.channel is None:
            await self._open(current, batch_size=rows)
        if tokens == 1:
            return await self._send(current, inputs)
        current.check_room(rows, tokens)
        info = self.servers.view.known.infos.get(current.peer)
        limit = tokens_per_message(inputs)
        if info is not None and info.max_batch_tokens > 0:
            limit = min(limit, info.max_batch_tokens)
        size = max(1, limit // rows)
        starts = range(0, tokens, size)
        answers = [await self._send(current, inputs.take_tokens(start, start + size)) for start in starts]
        check_same_routers(answers, f"server {current.peer}")
        return join_outputs(answers, dim=1)

    async def _open(self, current: _SpanSession, *, batch_size: int, fork_of: str | None = None) -> None:
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
        )
        # Copying takes time: the prefix, or all tokens of the session to fork.
        tokens = max(1, batch_size * current.history.length) if request.prefix or fork_of else 1
        opened = await current.ask(peers, request, SessionOpened, work="open session", units=tokens)
        current.name, current.room = opened.session, (batch_size, opened.max_tokens)
        current.sent = None if fork_of else SentSession(request)

    async def _send(self, current: _SpanSession, inputs: SpanInputs) -> SpanOutputs:
        peers, history = self.servers.peers, current.history
        started = time.perf_counter()
        # Nothing trains between the tokens of a generation, but a prompt may follow a training step.
        is_prompt = inputs.hidden.shape[1] > 1 or history.length == 0
        part = self.servers.digests.part(inputs.adapters, current.blocks, verify=is_prompt)
        request = SessionStep(
            hidden=inputs.hidden.detach(),
            cached_tokens=history.length,
            position_ids=inputs.position_ids,
            attention_mask=inputs.attention_mask,
            ops=tuple(current.unsent_ops),
            adapters=part.digests,
            adapter_rows=part.rows,
            collect_hidden=inputs.collect_hidden,
            collect_router=inputs.collect_router,
            reply_codec=peers.config.codec,
            nonce=self.servers.view.observer.nonce(),
        )
        units, codec = inputs.num_tokens, peers.config.codec
        response = await peers.with_adapters(
            current.peer,
            part.shipped,
            lambda: current.ask(peers, request, SessionStepResponse, work="rpc_session", units=units, codec=codec),
        )
        check_outputs(response, inputs, current.peer)
        current.note_sent(request)
        current.unsent_ops = []
        current.is_due = inputs.hidden.shape[1] == 1 and current.times.add(time.perf_counter() - started)
        history.append(inputs)
        view = self.servers.view
        await view.observer.step_done(
            StepCall(
                peer=current.peer,
                info=view.known.infos.get(current.peer),
                history=history,
                sent=current.sent,
                adapters=part.shipped,
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
                twin = _SpanSession(current.peer, current.blocks, current.history.copy())
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


def _parts(chain: Sequence[SpanChoice], blocks: range, history: History) -> list[_SpanSession]:
    """Returns sessions to open for the parts of some blocks, with their parts of the history's prefix."""
    return [
        _SpanSession(
            peer, range(start, end), History(history.prefix[2 * (start - blocks.start) : 2 * (end - blocks.start)])
        )
        for peer, start, end in chain
    ]
