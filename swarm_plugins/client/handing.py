"""Tensors that servers hand on to each other, from where the client stands: it sends what does not arrive."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from swarm_plugins.errors import RefusedError, RemoteError, SwarmError
from swarm_plugins.transport.codec import tensor_hash
from swarm_plugins.transport.messages import PushedHidden

if TYPE_CHECKING:
    from swarm_plugins.client.discovery.view import Servers
    from swarm_plugins.client.peers import Peers

_PATIENCE_S = 2.0
"""An answer may be later than usual by this and by the time in which its input travels. Then the client sends that."""
_SLOW_BYTES_PER_S = 1_250_000.0
"""10 Mbit/s: the rate at which an input travels from server to server, or the client's is there sooner."""
_PART_OF_DEADLINE = 0.5
"""Share of an answer's deadline after which the client sends the input in any case."""
_WORTH_S = 0.003
"""Round trip to the farthest server from which on pushing saves more time than its messages take. Distances between
servers need not be known: none is longer than the way by the client."""


class PostedInVainError(SwarmError):
    """A request must be sent again, by this client, and nobody is to blame."""


class Handover(NamedTuple):
    """An input that one server is to send to another."""

    sender: str
    receiver: str
    name: str
    """Of the session, or of the slot."""
    step: int


def is_handing_on(servers: Servers, peers: Sequence[str]) -> bool:
    """Returns whether each of some servers is to send its output to the next one.

    Says once of each server that it cannot.
    """
    config, hops, paces = servers.peers.config, servers.peers.hops, servers.peers.paces
    if len(peers) < 2 or config.push == "off":
        return False
    round_trips_s = [trip_s for peer in peers if (trip_s := paces.round_trip_s(peer)) is not None]
    if config.push == "auto" and max(round_trips_s, default=0.0) < _WORTH_S:
        return False
    infos = {peer: info for peer in peers if (info := servers.view.known.infos.get(peer)) is not None}
    for peer, info in infos.items():
        if not info.pushes:
            hops.found_unable(peer, info.software, level=logging.WARNING if config.push == "on" else logging.INFO)
    are_able = all(peer in infos and infos[peer].pushes for peer in peers)
    return are_able and all(hops.is_open(one, two) for one, two in itertools.pairwise(peers))


@contextlib.asynccontextmanager
async def feeding(servers: Servers, way: Handover, rpc: str, tensor: Tensor, *, is_sent: bool) -> AsyncIterator[None]:
    """Sends a server its input while its answer is awaited: at once, or, if it is believed to be there, when late."""

    async def feed() -> None:
        if is_sent:
            await asyncio.sleep(_patience_s(servers.peers, way.receiver, rpc, tensor))
            servers.peers.hops.failed(way.sender, way.receiver, "its input has not arrived in time")
        message = PushedHidden(session=way.name, step=way.step, hidden=tensor)
        with contextlib.suppress(SwarmError):
            channel = await servers.peers.open(way.receiver, "rpc_push")
            try:
                await servers.peers.post(channel, message)
            finally:
                await channel.close()

    task = asyncio.create_task(feed(), name="feed")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _patience_s(peers: Peers, receiver: str, rpc: str, tensor: Tensor) -> float:
    """Returns how long a server's answer may take until its input is believed not to have arrived."""
    tokens = tensor.shape[0] * tensor.shape[1]
    tokens += peers.queues.tokens_before(receiver, tokens)
    usual_s = 2 * peers.deadlines.usual_s(receiver, rpc, tokens)
    most_s = _PART_OF_DEADLINE * peers.deadlines.timeout_s(receiver, rpc, tokens)
    return max(_PATIENCE_S, min(_PATIENCE_S + usual_s + tensor.nbytes / _SLOW_BYTES_PER_S, most_s))


def started_s(servers: Servers, way: Handover, *, is_sent: bool) -> float:
    """Returns since when a server's answer is awaited, by ``time.perf_counter``, as if this client sent its input now.

    The client's way counts in a server's pace. So one that is farther from the server before than both of them announce
    looks slower by that much.
    """
    return time.perf_counter() - (servers.view.saved_s(way.sender, way.receiver) if is_sent else 0.0)


@contextlib.contextmanager
def excusing(servers: Servers, way: Handover) -> Iterator[None]:
    """Raises PostedInVainError instead of a failure of a server that may come from what its predecessor has sent it.

    Such as an overflow: a server that fails at what this client sends is at fault, another one should not be able to
    have it left out.
    """
    try:
        yield
    except RemoteError as error:
        if type(error) not in (RemoteError, RefusedError):
            raise
        servers.peers.hops.failed(way.sender, way.receiver, str(error))
        raise PostedInVainError(f"server {way.receiver} failed at what server {way.sender} has sent") from error


def check_handed(servers: Servers, way: Handover, input_hash: bytes, tensor: Tensor) -> None:
    """Raises PostedInVainError if a server has computed with something else than its predecessor has told the client.

    One of the two lies, or a way between them is broken: its answer is right for what it got.
    """
    if input_hash != tensor_hash(tensor):
        servers.peers.hops.failed(way.sender, way.receiver, "it has got something else")
        raise PostedInVainError(f"server {way.receiver} has got another input than this client")
