"""Outputs that servers hand on to each other: each is told of its call ahead; what does not arrive, the client sends.

So a tensor crosses the network once per server and not twice. A session's slot was agreed on when it was opened; other
calls get one each, whose name, number and key the client invents.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic

import msgspec
from torch import Tensor

from swarm_plugins.book import judging
from swarm_plugins.book.record import NotPushed
from swarm_plugins.client.answers import StreamLostError
from swarm_plugins.client.calls.call import Answer, Call, Caller, Request, Response
from swarm_plugins.errors import (
    CapacityError,
    RefusedError,
    RemoteError,
    SwarmError,
    UnknownAdapterError,
    printable,
)
from swarm_plugins.transport.admission.pushing import push_token
from swarm_plugins.transport.codec import tensor_hash
from swarm_plugins.transport.messages import PushedHidden, PushSlot, PushTo
from swarm_plugins.transport.pushed import emptied, plain

if TYPE_CHECKING:
    from swarm_plugins.client.discovery.view import SwarmView
    from swarm_plugins.client.peers import Peers
    from swarm_plugins.transport.channel import Channel

log = logging.getLogger(__name__)

_MAX_AHEAD = 8
"""Calls that a server has been told of, and has not answered; servers keep pushed inputs of so many."""
_UNABLE = "does not push"
_closing: set[asyncio.Task[None]] = set()
"""Kept until they are done."""


class SentInVainError(SwarmError):
    """A call must be sent again, by this client, and no server is at fault."""


class _UncollectedError(Exception):
    """Nothing waits for an answer any more."""


def is_pushing(peers: Peers, chain: Sequence[str]) -> bool:
    """Returns whether each of some servers is to send its output to the next one.

    Says once of each server that it cannot.
    """
    book, push = peers.book, peers.config.push
    # Distances between servers need not be known: none is longer than the way by the client.
    if len(chain) < 2 or push == "off" or (push == "auto" and not any(judging.is_far(book[peer]) for peer in chain)):
        return False
    infos = {peer: info for peer in chain if (info := book[peer].info) is not None}
    for peer, info in infos.items():
        if not info.pushes and book.is_news(peer, _UNABLE):
            text = "server %s (version %s) neither takes nor sends outputs of other servers: they go by this client"
            log.log(
                logging.WARNING if push == "on" else logging.INFO, text, peer, printable(info.software) or "unknown"
            )
    are_able = all(peer in infos and infos[peer].pushes for peer in chain)
    return are_able and not judging.closed_ways(book, chain) & set(itertools.pairwise(chain))


class Told(Generic[Request, Response]):
    """A call that its server is told of ahead of its input.

    Args:
        peers: Sends requests.
        view: Knows how far servers are from each other.
        call: The call; its input may still be that of another one, of the same shape.
        peer: The server.
        slot: Where it gets the input.
        sender: The server that sends that; empty: the client does, with the request.
    """

    def __init__(
        self,
        peers: Peers,
        view: SwarmView,
        call: Call[Request, Response],
        peer: str,
        slot: PushSlot,
        *,
        sender: str,
    ) -> None:
        self.peer = peer
        self.sender = sender
        self.is_fed = False
        """Whether its input is believed to be there."""
        self.is_given_up = False
        """Whether no server sends its input any more."""
        self.is_begun = False
        """Whether part of it may have reached its server."""
        self.is_collected = False
        """Whether its answer was waited for."""
        self._peers = peers
        self._view = view
        self._call = call
        self._slot = slot
        self._request: Request | None = None
        self._channel: Channel | None = None
        self._error: SwarmError | None = None
        """Why the server was not told."""
        self._is_over = asyncio.Event()
        """The attempt to tell it."""
        self._stream = contextlib.AsyncExitStack()

    @property
    def is_told(self) -> bool:
        """Whether the server knows of the call."""
        return self._channel is not None

    def push_to(self) -> PushTo:
        """Returns what the server before is to send its output to."""
        slot = self._slot
        token = push_token(slot.key, self.sender, slot.step)
        return PushTo(peer=self.peer, session=slot.name, step=slot.step, token=token)

    def note_pushed(self, not_pushed: str) -> None:
        """Notes whether the server before has sent its output, or why not."""
        self.is_fed = not not_pushed
        if not_pushed:
            self._rest(printable(not_pushed))

    def _rest(self, why: str) -> None:
        book = self._peers.book
        book.observe(self.sender, NotPushed(self.peer))
        rest_s = book[self.sender].rests[self.peer].length_s
        text = "server %s does not reach server %s (%s): outputs go by this client for %g s"
        log.info(text, self.sender, self.peer, why, rest_s)

    async def post(self) -> bool:
        """Tells the server; returns whether it may be told of another call. Errors show when the answer is due."""
        call, peers = self._call, self._peers
        if self._is_over.is_set():
            return False
        try:
            self._request = request = outgoing(call, self.peer)
            await peers.upload(self.peer, call.adapters)
            channel = await self._stream.enter_async_context(call.lending(peers, self.peer))
            sent = emptied(request, self._slot) if self.sender else request
            self.is_begun = True
            await peers.post(channel, sent, work=call.rpc, units=call.tokens)
            self._channel = channel
        except SwarmError as exc:
            self._error = exc
        self._is_over.set()
        return self.is_told

    def give_up(self) -> None:
        """Ends telling: the server is asked by this client."""
        self.is_given_up = True
        self._is_over.set()

    def at_end(self, call: Callable[[], None]) -> None:
        """Calls something when the server has answered, or the call is given up."""
        self._stream.callback(call)

    async def collect(self) -> Answer[Request, Response] | None:
        """Returns the server's answer. None: it was not told, or has to be asked again, and nobody is to blame.

        Raises:
            SentInVainError: If the server got something else or failed at what it got, and its session is closed.
            SwarmError: As for any call.
        """
        call, self.is_collected = self._call, True
        try:
            async with self._stream:
                await self._is_over.wait()
                if self._error is not None:
                    raise self._error
                if self._request is None or self._channel is None:
                    return None
                response = await self._answer(self._channel, self._request, call.input())
        except UnknownAdapterError as exc:
            # Dropped since it was uploaded. The stream lives on.
            if call.is_queued:
                return None
            raise SentInVainError(str(exc)) from exc
        except (SentInVainError, StreamLostError, RemoteError, CapacityError) as exc:
            if call.is_queued:
                return None
            if self._error is not None:
                raise SentInVainError(f"server {self.peer} was not told: {exc}") from exc
            raise
        return Answer(self.peer, plain(self._request, call.input()), response, is_pushed=bool(self.sender))

    async def _answer(self, channel: Channel, request: Request, tensor: Tensor) -> Response:
        call, peers = self._call, self._peers
        saved_s = self._view.saved_s(self.sender, self.peer) if self.is_fed else 0.0
        # As if this client sent its input now: its way counts in a server's pace. So one that is farther from the
        # server before than both of them announce looks slower by that much.
        started = time.perf_counter() - saved_s
        async with self._feeding(tensor):
            await call.confirmed(peers)
            with self._excusing():
                response = await call.collect(peers, channel, request, started=started)
        if self.sender and getattr(response, "input_hash", b"") != tensor_hash(tensor):
            # One of the two servers lies, or a way between them is broken: the answer is right for what it got.
            self._rest("it has got something else")
            raise SentInVainError(f"server {self.peer} has got another input than this client")
        return response

    @contextlib.asynccontextmanager
    async def _feeding(self, tensor: Tensor) -> AsyncIterator[None]:
        """Sends the input while the answer is awaited: at once, or if it is believed to be there, when late."""
        if not self.sender:
            yield
            return
        task = asyncio.create_task(self._feed(tensor), name="feed")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _feed(self, tensor: Tensor) -> None:
        call, peers = self._call, self._peers
        if self.is_fed:
            record = peers.book.kept(self.peer)
            tokens = call.tokens + (record.backlog.tokens_before(call.tokens) if call.is_queued else 0)
            await asyncio.sleep(judging.push_wait_s(record, call.rpc, tokens, tensor.nbytes))
            self._rest("its input has not arrived in time")
        message = PushedHidden(session=self._slot.name, step=self._slot.step, hidden=tensor)
        with contextlib.suppress(SwarmError):
            channel = await peers.open(self.peer, "rpc_push")
            try:
                await peers.post(channel, message, work="rpc_push", units=call.tokens)
            finally:
                await channel.close()

    @contextlib.contextmanager
    def _excusing(self) -> Iterator[None]:
        """Raises SentInVainError instead of a failure of a server that may come from what its predecessor has sent it.

        Such as an overflow: a server that fails at what this client sends is at fault, another one should not be able
        to have it left out.
        """
        try:
            yield
        except RemoteError as exc:
            if not self.sender or type(exc) not in (RemoteError, RefusedError):
                raise
            self._rest(str(exc))
            raise SentInVainError(f"server {self.peer} failed at what server {self.sender} has sent") from exc

    async def close(self) -> None:
        """Ends the call if its answer was not collected. Idempotent."""
        self.give_up()
        # A stream with an answer to come is of no use to others: it is closed as after an error.
        gone = _UncollectedError()
        with contextlib.suppress(_UncollectedError):
            await self._stream.__aexit__(type(gone), gone, None)


async def close_all(telling: Sequence[asyncio.Task[None]], told: Sequence[Told[Any, Any]]) -> None:
    """Ends telling, and the calls whose answers were not collected; in the background if this wait is cancelled."""

    async def close() -> None:
        for task in telling:
            task.cancel()
        for found in await asyncio.gather(*telling, return_exceptions=True):
            if isinstance(found, Exception):
                log.error("telling a server ahead has failed", exc_info=found)
        for call in left:
            await call.close()

    left = [call for call in told if not call.is_collected]
    if left or telling:
        closing = asyncio.create_task(close(), name="end calls told ahead")
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)
        await asyncio.shield(closing)


async def tell(calls: Sequence[Told[Request, Response]]) -> None:
    """Tells one server of its calls, in order, a few ahead of the answers."""
    room = asyncio.Semaphore(_MAX_AHEAD)
    try:
        for told in calls:
            await room.acquire()
            told.at_end(room.release)
            if not await told.post():
                return
    finally:
        for told in calls:
            if not told.is_told:
                told.give_up()


def outgoing(call: Call[Request, Response], peer: str) -> Request:
    """Returns the request to a peer, with where its output goes if another server waits for that."""
    after = call.next
    if after is None or after.sender != peer or after.is_given_up:
        return call.request([peer])
    return msgspec.structs.replace(call.request([peer, after.peer]), push_to=after.push_to())


class Pushed:
    """Collects the answers of servers that were told ahead of the input; asks the others."""

    def __init__(self, inner: Caller) -> None:
        self._inner = inner

    async def ask(self, call: Call[Request, Response], peer: str) -> Answer[Request, Response]:
        """Asks a server; see `Caller`."""
        told = call.told
        if told is None or told.peer != peer:
            return await self._inner.ask(call, peer)
        call.told = None
        answer = await told.collect()
        if answer is None:
            return await self._inner.ask(call, peer)
        received(call, answer)
        return answer


def received(call: Call[Request, Response], answer: Answer[Request, Response]) -> None:
    """Checks an answer, and notes whether the server has handed it on."""
    call.receive(answer)
    after = call.next
    if after is not None and after.sender == answer.peer and not after.is_given_up:
        after.note_pushed(getattr(answer.response, "not_pushed", ""))
