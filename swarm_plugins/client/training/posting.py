"""Requests of a chunk of which servers are told ahead: their inputs come from the servers before them."""

from __future__ import annotations

import asyncio
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

import msgspec
from torch import Tensor

from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.client.answers import StreamLostError
from swarm_plugins.client.handing import Handover, PostedInVainError, check_handed, excusing, feeding, started_s
from swarm_plugins.errors import CapacityError, RemoteError, printable
from swarm_plugins.transport.admission.pushing import new_push_key, push_token
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    ForwardRequest,
    ForwardResponse,
    PushSlot,
    PushTo,
)

if TYPE_CHECKING:
    from swarm_plugins.client.discovery.view import Servers

Request = TypeVar("Request", ForwardRequest, BackwardRequest)
Response = TypeVar("Response", ForwardResponse, BackwardResponse)
_Place = tuple[str, range]


class Span(NamedTuple, Generic[Request]):
    """A server of a chain, and its request; that has its input only if the server is the first one."""

    peer: str
    blocks: range
    request: Request
    adapters: tuple[LoadedAdapter, ...]
    """Those that the request names."""
    tokens: int
    """Rows times tokens of its input."""
    num_bytes: int
    """Size of that."""


@dataclass
class _Told(Generic[Request, Response]):
    request: Request
    slot: PushSlot
    sender: str
    input: asyncio.Future[Tensor] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Set when the client has it, too."""
    task: asyncio.Task[Response] | None = None
    is_sent: bool = False
    """Whether it is believed to be there."""


class Posted(ABC, Generic[Request, Response]):
    """What the servers of a chain were told.

    Args:
        servers: Who they are, and which hops have failed.
    """

    rpc: ClassVar[str]
    kind: type[Response]
    """Of the answers."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._told: dict[_Place, _Told[Request, Response]] = {}
        self._to: dict[_Place, tuple[PushTo, _Told[Request, Response]]] = {}

    @abstractmethod
    def plain(self, request: Request, tensor: Tensor) -> Request:
        """Returns a request as if all of it had come from here."""

    @abstractmethod
    def emptied(self, request: Request, slot: PushSlot) -> Request:
        """Returns a request whose input comes from another server."""

    def tell(self, spans: Sequence[Span[Request]]) -> None:
        """Tells all servers but the first of their requests, in the background; not those with too many already."""
        peers = self._servers.peers
        for one, two in itertools.pairwise(spans):
            room = self._servers.view.known.max_batch_tokens(two.peer)
            if not peers.queues.claim(two.peer, two.tokens, room=room):
                continue
            slots = self._servers.slots
            slot = PushSlot(name=slots.name, step=next(slots.steps), key=new_push_key(), num_bytes=two.num_bytes)
            told = _Told[Request, Response](two.request, slot, one.peer)
            token = push_token(slot.key, one.peer, slot.step)
            self._to[one.peer, one.blocks] = PushTo(peer=two.peer, session=slot.name, step=slot.step, token=token), told
            self._told[two.peer, two.blocks] = told
        for span in spans[1:]:
            found = self._told.get((span.peer, span.blocks))
            if found is not None:
                found.task = asyncio.create_task(self._run(span, found), name="posted request")
                found.task.add_done_callback(functools.partial(self._end, span))

    def receivers(self, peer: str, blocks: range) -> list[str]:
        """Returns who gets the output of a request: nobody else, or another server; first the one that is asked."""
        place = (peer, blocks)
        return [peer, self._to[place][0].peer] if place in self._to else [peer]

    def handed_on(self, peer: str, blocks: range, request: Request) -> Request:
        """Returns a request with where its output goes, if another server waits for it."""
        place = (peer, blocks)
        return msgspec.structs.replace(request, push_to=self._to[place][0]) if place in self._to else request

    def answered(self, peer: str, blocks: range, response: Response) -> None:
        """Notes whether a server has handed on its output."""
        if (peer, blocks) in self._to:
            to, told = self._to[peer, blocks]
            told.is_sent = not response.not_pushed
            if response.not_pushed:
                self._servers.peers.hops.failed(peer, to.peer, printable(response.not_pushed))

    async def collect(self, peer: str, blocks: range, tensor: Tensor) -> tuple[Request, Response] | None:
        """Returns a server's answer, and its request as if all of it had come from here; ``tensor`` is its input.

        None if the server was not told of it, or has to be asked again and nobody is to blame.

        Raises:
            SwarmError: As for any request.
        """
        told = self._told.pop((peer, blocks), None)
        if told is None or told.task is None:
            return None
        told.input.set_result(tensor)
        try:
            return self.plain(told.request, tensor), await told.task
        except (PostedInVainError, StreamLostError, RemoteError, CapacityError):
            return None
        finally:
            told.task.cancel()

    async def _run(self, span: Span[Request], told: _Told[Request, Response]) -> Response:
        peers = self._servers.peers
        request = self.handed_on(span.peer, span.blocks, self.emptied(told.request, told.slot))
        way = Handover(told.sender, span.peer, told.slot.name, told.slot.step)
        await peers.upload(span.peer, span.adapters)
        with excusing(self._servers, way):
            async with peers.lending(span.peer, self.rpc) as channel:
                await peers.post(channel, request)
                tensor = await told.input
                async with feeding(self._servers, way, self.rpc, tensor, is_sent=told.is_sent):
                    started = started_s(self._servers, way, is_sent=told.is_sent)
                    response = await peers.collect(
                        channel,
                        request,
                        self.kind,
                        work=self.rpc,
                        units=span.tokens,
                        blocks=len(span.blocks),
                        started=started,
                    )
        check_handed(self._servers, way, response.input_hash, tensor)
        return response

    def _end(self, span: Span[Request], _: object) -> None:
        self._servers.peers.queues.release(span.peer, span.tokens)

    async def close(self) -> None:
        """Ends the requests whose answers were not collected."""
        tasks = [told.task for told in self._told.values() if told.task is not None]
        self._told.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
