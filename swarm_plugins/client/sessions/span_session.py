"""The part of a session that runs on one server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from swarm_plugins.block_io import CacheOp
from swarm_plugins.client.paces import StepTimes
from swarm_plugins.client.sessions.history import History
from swarm_plugins.errors import CapacityError, SessionLostError, SwarmError, UnknownAdapterError
from swarm_plugins.transport.messages import SessionOpen, SessionOpened, SessionStep, SessionStepResponse

if TYPE_CHECKING:
    from swarm_plugins.client.observer import SentSession
    from swarm_plugins.client.peers import Peers
    from swarm_plugins.transport.channel import Channel


class SpanSession:
    """The session on one server, and what was sent to it."""

    def __init__(self, peer: str, blocks: range, history: History) -> None:
        self.peer = peer
        self.blocks = blocks
        self.history = history
        self.channel: Channel | None = None
        self.name = ""
        """By which the server knows it, once it has confirmed it."""
        self.push_name = ""
        """By which other servers know it; empty if none may send this one its input."""
        self.push_key = b""
        """By which the client allows them to."""
        self._unconfirmed: SessionOpen | None = None
        self.num_steps = 0
        """Steps sent over the stream, failed ones too."""
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
        """Changes the cache, here at once and on the server with the next step."""
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

    async def open(self, peers: Peers, request: SessionOpen) -> None:
        """Sends the first message of a stream; it is confirmed before the first answer to a step."""
        self.channel = await peers.open(self.peer, "rpc_session")
        self.unsent_ops, self.num_steps, self.room = [], 0, (0, 0)
        self.push_name, self.push_key = request.push_name, request.push_key
        self._unconfirmed = request
        async with self.streaming() as channel:
            await peers.post(channel, request)

    async def confirm(self, peers: Peers) -> None:
        """Waits until the session is open, if it was not confirmed yet.

        Raises:
            SwarmError: If the server refuses it, or does not answer in time.
        """
        request, self._unconfirmed = self._unconfirmed, None
        if request is None:
            return
        # Copying takes time: the prefix, or all tokens of the session to fork.
        copied = self.history.length if request.prefix or request.fork_of else 0
        async with self.streaming() as channel:
            opened = await peers.collect(
                channel, request, SessionOpened, work="open session", units=max(1, request.batch_size * copied)
            )
        self.name, self.room = opened.session, (request.batch_size, opened.max_tokens)

    async def ask(self, peers: Peers, request: SessionStep, *, units: int) -> SessionStepResponse:
        """Sends a step over the session's stream and returns the answer."""
        async with self.streaming() as channel:
            self.num_steps += 1
            started = time.perf_counter()
            await peers.post(channel, request)
            await self.confirm(peers)
            return await peers.collect(
                channel,
                request,
                SessionStepResponse,
                work="rpc_session",
                units=units,
                blocks=len(self.blocks),
                started=started,
            )

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
