"""A server in this process that stands in for missing ones."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from swarm_plugins.client.observer import BackwardCall, CallObserver, ForwardCall, StepCall
from swarm_plugins.fallback.memory import MemoryStreams
from swarm_plugins.transport.channel import Channel, Transport
from swarm_plugins.transport.identity import new_identity

if TYPE_CHECKING:
    from swarm_plugins.checkpoint import Checkpoint
    from swarm_plugins.client.discovery.view import Servers
    from swarm_plugins.client.peers import Peers

log = logging.getLogger(__name__)

_STEP_S, _TOKEN_S = 60.0, 1.0
"""Announced to this client's deadlines: this machine may be slow, but it does not vanish."""


class _Hosted(NamedTuple):
    """Blocks that run here."""

    peer: str
    blocks: range
    served: Any
    """A `HostedBlocks` of the server's part."""


class StandIn:
    """Serves missing blocks; observes calls for another observer, except its own ones.

    Args:
        inner: Examines the answers of other servers.
        peers: The client's requests, which reach this server from now on.
        open_checkpoint: Opens the model, on first use.
    """

    def __init__(self, inner: CallObserver, peers: Peers, open_checkpoint: Callable[[], Checkpoint]) -> None:
        self.inner = inner
        self._peers = peers
        self._open_checkpoint = open_checkpoint
        self._hosted: dict[str, _Hosted] = {}
        self._streams = MemoryStreams()
        self._lock = asyncio.Lock()
        peers.transport = _Rerouted(peers.transport, self._open)

    async def stand_in(self, blocks: range) -> str:
        """Loads blocks that no server holds, unless they are here already; returns the peer that serves them.

        Raises:
            CheckpointError: If the blocks cannot be read.
        """
        async with self._lock:
            for hosted in self._hosted.values():
                if blocks.start >= hosted.blocks.start and blocks.stop <= hosted.blocks.stop:
                    return hosted.peer
            log.warning("no server holds blocks %d:%d: they run here until one does", blocks.start, blocks.stop)
            hosted = await asyncio.to_thread(self._host, blocks)
            self._hosted[hosted.peer] = hosted
            self._peers.deadlines.announce(hosted.peer, step_s=_STEP_S, token_s=_TOKEN_S * len(blocks))
            return hosted.peer

    def _host(self, blocks: range) -> _Hosted:
        # Loads what a server needs, now that this client has to be one.
        served = importlib.import_module("swarm_plugins.server.stand_in").host_blocks(self._open_checkpoint(), blocks)
        return _Hosted(new_identity().peer_id, blocks, served)

    def _open(self, peer: str, rpc: str) -> Channel | None:
        hosted = self._hosted.get(peer)
        return None if hosted is None else self._streams.open(peer, hosted.served.handlers[rpc])

    def is_excluded(self, peer: str) -> bool:
        """Returns whether a peer must not be asked at all."""
        return peer not in self._hosted and self.inner.is_excluded(peer)

    def nonce(self) -> bytes:
        """Returns what to send as nonce of a request."""
        return self.inner.nonce()

    async def forward_done(self, call: ForwardCall) -> None:
        """Lets a forward be examined, unless it ran here."""
        if call.peer not in self._hosted:
            await self.inner.forward_done(call)

    async def backward_done(self, call: BackwardCall) -> None:
        """Lets a backward be examined, unless it ran here."""
        if call.peer not in self._hosted:
            await self.inner.backward_done(call)

    async def step_done(self, call: StepCall) -> None:
        """Lets a step be examined, unless it ran here."""
        if call.peer not in self._hosted:
            await self.inner.step_done(call)

    async def close(self) -> None:
        """Ends the server and frees the blocks. Idempotent."""
        await self.inner.close()
        await self._streams.close()
        hosted, self._hosted = list(self._hosted.values()), {}
        for one in hosted:
            await asyncio.to_thread(one.served.close)


def with_stand_in(observer: CallObserver, servers: Servers, open_checkpoint: Callable[[], Checkpoint]) -> CallObserver:
    """Returns an observer that also runs missing blocks here, if the client's settings ask for that."""
    if not servers.view.config.local_fallback:
        return observer
    return StandIn(observer, servers.peers, open_checkpoint)


class _Rerouted:
    """A transport that reaches the peers of this process through memory."""

    def __init__(self, inner: Transport, open_here: Callable[[str, str], Channel | None]) -> None:
        self._inner = inner
        self._open_here = open_here

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        """Opens a channel; see `Transport`."""
        return self._open_here(peer, rpc) or await self._inner.open(peer, rpc, timeout_s=timeout_s)

    async def close(self) -> None:
        """Closes the inner transport."""
        await self._inner.close()
