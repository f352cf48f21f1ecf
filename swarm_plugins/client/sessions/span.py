"""The part of a session that runs on one server: its stream, what was sent over it, and its steps."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from swarm_plugins.block_io import CacheOp, SpanInputs, SpanOutputs, join_outputs, page_size
from swarm_plugins.book.record import Forgiven
from swarm_plugins.client.answers import check_outputs, check_same_routers
from swarm_plugins.client.calls.call import Answer, Call
from swarm_plugins.client.sessions.history import History
from swarm_plugins.client.sessions.times import StepTimes
from swarm_plugins.client.splitting import tokens_per_message
from swarm_plugins.errors import CapacityError, SessionLostError, SwarmError, UnknownAdapterError
from swarm_plugins.transport.admission.pushing import new_push_key
from swarm_plugins.transport.messages import (
    PushSlot,
    SessionOpen,
    SessionOpened,
    SessionStep,
    SessionStepResponse,
)
from swarm_plugins.transport.optional import or_unset

if TYPE_CHECKING:
    from swarm_plugins.client.peers import Peers
    from swarm_plugins.client.servers import Servers
    from swarm_plugins.transport.channel import Channel

_OPEN = "open session"
"""Under this name, the book keeps how long opening a session takes."""


@dataclass(frozen=True)
class SentSession:
    """All messages sent to a session on one server, if none of them changed what was already cached."""

    opened: SessionOpen
    steps: list[tuple[SessionStep, bool]] = field(default_factory=list)
    """Answered steps, and whether another server sent their input; grows with the session."""


class SpanSession:
    """The session on one server.

    Args:
        servers: The swarm.
        peer: The server.
        blocks: Its blocks.
        history: What was sent to it, or is to be replayed.
    """

    def __init__(self, servers: Servers, peer: str, blocks: range, history: History) -> None:
        self.peer = peer
        self.blocks = blocks
        self.history = history
        self.channel: Channel | None = None
        self.push_key = b""
        """Secret by which the client allows other servers to send this one its input; empty: none may."""
        self.unsent_ops: list[CacheOp] = []
        """Changes already in the history, but not on the server."""
        self.times = StepTimes(servers.peers.book.rules)
        self.is_due = False
        """Whether it is time to look for a faster server."""
        self.sent: SentSession | None = None
        """What the history has come from, as far as receipts may name it."""
        self._servers = servers
        self._name = ""
        """By which the server knows it, once it has confirmed it."""
        self._push_name = ""
        self._unconfirmed: SessionOpen | None = None
        self._num_steps = 0
        """Steps sent over the stream, failed ones too."""
        self._room = (0, 0)
        """Rows it was opened with, and how many tokens per row the server then promised to hold."""

    @property
    def is_lost(self) -> bool:
        """Whether the session ended after something was sent to it."""
        return self.channel is None and bool(self.history.steps)

    def own(self, inputs: SpanInputs) -> SpanInputs:
        """Returns the inputs for this span's blocks, marked if its server announces states."""
        info = self._servers.view.said(self.peer)
        return replace(inputs, blocks=self.blocks, has_states=info is not None and info.has_states)

    # -- the cache ----------------------------------------------------------------------------------------------------

    def apply(self, ops: Sequence[CacheOp]) -> None:
        """Changes the cache, here at once and on the server with the next step."""
        for op in ops:
            self.history.apply(op)
        if self.channel is not None:
            self.unsent_ops.extend(ops)

    def crop(self, length: int) -> None:
        """Takes back what was sent after the first ``length`` tokens."""
        if self.history.length > length:
            self.apply([CacheOp(kind="crop", indices=(length,))])

    def check_room(self, rows: int, new_tokens: int) -> None:
        """Raises CapacityError before a long input is sent in parts, if the server has promised less room."""
        rows_then, limit = self._room
        length = self.history.length + new_tokens
        # The promise holds for this number of rows only.
        if rows == rows_then and length > limit:
            raise CapacityError(
                f"server {self.peer} holds {limit} tokens per row at most in a session of {rows} rows, {length} "
                "are needed: shorten the prompt, use fewer rows, or serve with more room"
            )

    # -- the stream ---------------------------------------------------------------------------------------------------

    async def open(self, rows: int, *, fork_of: SpanSession | None = None) -> None:
        """Begins to open a session, empty but for the history's prefix, or as the copy of another one."""
        servers, info = self._servers, self._servers.view.said(self.peer)
        takes_pushes = servers.peers.config.push != "off" and info is not None and info.pushes
        self._push_name = secrets.token_urlsafe(16) if takes_pushes else ""
        self.push_key = new_push_key() if takes_pushes else b""
        self.channel = await servers.peers.open(self.peer, "rpc_session")
        self.unsent_ops, self._num_steps = [], 0
        # Or less, as it will say.
        self._room = (rows, info.max_session_tokens) if info is not None and info.max_session_tokens > 0 else (0, 0)
        self._unconfirmed = request = SessionOpen(
            version=servers.view.version.key,
            start=self.blocks.start,
            end=self.blocks.stop,
            batch_size=rows,
            fork_of=None if fork_of is None else fork_of._name,
            prefix=self.history.prefix if fork_of is None else (),
            push_name=self._push_name,
            push_key=self.push_key,
        )
        async with self.streaming() as channel:
            await servers.peers.post(channel, request, work=_OPEN, units=self._copied(request))
        self.sent = SentSession(request) if fork_of is None else None

    async def open_ahead(self, rows: int) -> None:
        """Opens a session that has nothing to replay; if that fails, it is opened again at its turn."""
        if self.channel is None and not self.is_lost:
            try:
                await self.open(rows)
            except SwarmError:
                await self.close()  # the error shows at its turn

    async def confirm(self) -> None:
        """Waits until the session is open, if it was not confirmed yet.

        Raises:
            SwarmError: If the server refuses it, or does not answer in time.
        """
        request, self._unconfirmed = self._unconfirmed, None
        if request is None:
            return
        async with self.streaming() as channel:
            opened = await self._servers.peers.collect(
                channel, request, SessionOpened, work=_OPEN, units=self._copied(request)
            )
        self._name, self._room = opened.session, (request.batch_size, opened.max_tokens)

    def _copied(self, request: SessionOpen) -> int:
        """Returns how many tokens the server copies to open a session: those of its prefix, or of the one it forks."""
        return max(1, request.batch_size * self.history.length) if request.prefix or request.fork_of else 1

    @contextlib.asynccontextmanager
    async def streaming(self) -> AsyncIterator[Channel]:
        """Lends the session's stream, and closes it if that fails: a late answer would be taken for the next one."""
        channel = self.channel
        if channel is None:
            raise SessionLostError(f"the session on server {self.peer} is closed")
        try:
            yield channel
        except UnknownAdapterError:
            raise  # the stream lives on
        except BaseException:
            if self.channel is channel:  # not if the session was opened again meanwhile
                await self.close()
            raise

    async def close(self) -> None:
        """Closes the stream, and with it the session on the server. Idempotent."""
        channel, self.channel = self.channel, None
        if channel is not None:
            with contextlib.suppress(SwarmError):
                await channel.close()

    # -- steps --------------------------------------------------------------------------------------------------------

    async def advance(self, inputs: SpanInputs) -> SpanOutputs:
        """Runs new tokens, in parts small enough for the server."""
        inputs = self.own(inputs)
        rows, tokens = inputs.hidden.shape[:2]
        if self.channel is None:
            await self.open(rows)
        if tokens == 1:
            return await self.ask(StepCall(self._servers, self, inputs, self.history.length))
        self.check_room(rows, tokens)
        parts = inputs.cut_tokens(self.tokens_at_once(inputs), self.history.length)
        if len(parts) > 1:
            await self.confirm()
            self.check_room(rows, tokens)
        answers = [await self.ask(StepCall(self._servers, self, part, self.history.length)) for part in parts]
        check_same_routers(answers, f"server {self.peer}")
        return join_outputs(answers, dim=1)

    def tokens_at_once(self, inputs: SpanInputs) -> int:
        """Returns how many tokens of each row go in one message."""
        limit = tokens_per_message(replace(inputs, blocks=self.blocks))
        most = self._servers.view.max_batch_tokens(self.peer)
        tokens = max(1, (min(limit, most) if most > 0 else limit) // inputs.hidden.shape[0])
        return page_size(tokens, tokens)

    async def ask(self, call: StepCall) -> SpanOutputs:
        """Makes one step."""
        response = (await self._servers.caller.ask(call, self.peer)).response
        self._servers.peers.book.observe(self.peer, Forgiven())
        if call.inputs.collect_hidden and not call.inputs.collects_inner:
            # Something in the place of what was not asked for, so that the others keep theirs along the chain.
            filler = (response.hidden,) * (len(self.blocks) - 1)
            filled: SpanOutputs = msgspec.structs.replace(response, hidden_states=filler)
            return filled
        return response

    def slot(self, steps_ahead: int, num_bytes: int) -> PushSlot:
        """Returns where other servers send the input of a step to come."""
        return PushSlot(
            name=self._push_name, step=self._num_steps + steps_ahead, key=self.push_key, num_bytes=num_bytes
        )

    @contextlib.asynccontextmanager
    async def next_step(self) -> AsyncIterator[Channel]:
        """Lends the session's stream for one step."""
        async with self.streaming() as channel:
            self._num_steps += 1
            yield channel

    def note(self, inputs: SpanInputs, answer: Answer[SessionStep, SessionStepResponse], seconds: float) -> None:
        """Records a step that was answered; a change of the cache ends the record for receipts, as does one without."""
        request = answer.request
        self.is_due = inputs.hidden.shape[1] == 1 and self.times.add(seconds)
        if self.sent is not None and request.nonce and not request.ops:
            self.sent.steps.append((request, answer.is_pushed))
        else:
            self.sent = None
        self.unsent_ops = []
        self.history.append(inputs, request.adapters)


class StepCall(Call[SessionStep, SessionStepResponse]):
    """A step of a session on one server: new tokens.

    Args:
        servers: The swarm.
        session: The session.
        inputs: The new tokens, for its blocks.
        cached: Tokens per row before them, some of which may still be on their way to the server.
    """

    rpc = "rpc_session"
    kind = SessionStepResponse

    def __init__(self, servers: Servers, session: SpanSession, inputs: SpanInputs, cached: int) -> None:
        # Nothing trains between the tokens of a generation, but a prompt may follow a training step.
        is_prompt = inputs.hidden.shape[1] > 1 or cached == 0
        is_first = cached == session.history.length
        self._part = servers.digests.part(inputs.adapters, session.blocks, verify=is_prompt and is_first)
        super().__init__(session.blocks, inputs.num_tokens, self._part.shipped)
        self.session = session
        self.inputs = inputs
        self.started = time.perf_counter()
        """When its server could begin."""
        self._servers = servers
        self._cached = cached

    def input(self) -> Tensor:
        """Returns the hidden states."""
        return self.inputs.hidden

    def request(self, peers: Sequence[str]) -> SessionStep:
        """Returns the message to the first of some peers."""
        inputs, session = self.inputs, self.session
        return SessionStep(
            hidden=inputs.hidden.detach(),
            cached_tokens=self._cached,
            position_ids=inputs.position_ids,
            attention_mask=inputs.attention_mask,
            layer_masks=inputs.layer_masks or msgspec.UNSET,
            token_ids=or_unset(inputs.token_ids),
            ops=tuple(session.unsent_ops) if self._cached == session.history.length else (),
            adapters=self._part.digests,
            adapter_rows=inputs.adapters.rows,
            collect_hidden=inputs.collects_inner,
            collect_router=inputs.collect_router,
            reply_codec=self._servers.view.codecs.between(inputs.hidden, *peers),
            nonce=self._servers.nonce(),
        )

    def lending(self, peers: Peers, peer: str) -> AbstractAsyncContextManager[Channel]:
        """Lends the session's stream."""
        return self.session.next_step()

    async def send(self, peers: Peers, peer: str, request: SessionStep) -> SessionStepResponse:
        """Sends the step over the session's stream and returns the answer."""
        async with self.session.next_step() as channel:
            started = time.perf_counter()
            await peers.post(channel, request, work=self.rpc, units=self.tokens)
            await self.session.confirm()
            return await self.collect(peers, channel, request, started=started)

    async def confirmed(self, peers: Peers) -> None:
        """Waits until the session is open."""
        await self.session.confirm()

    def receive(self, answer: Answer[SessionStep, SessionStepResponse]) -> None:
        """Checks the shape of an answer, and records the step."""
        check_outputs(answer.response, self.inputs, answer.peer)
        self.session.note(self.inputs, answer, time.perf_counter() - self.started)
