"""A server in this process that stands in for missing ones."""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swarm_plugins.client.observer import BackwardCall, CallObserver, ForwardCall, StepCall
from swarm_plugins.fallback.memory import MemoryStreams
from swarm_plugins.transport.channel import Channel, Handler, Transport
from swarm_plugins.transport.identity import new_identity

if TYPE_CHECKING:
    from swarm_plugins.checkpoint import Checkpoint
    from swarm_plugins.client.discovery.view import Servers
    from swarm_plugins.client.peers import Peers

log = logging.getLogger(__name__)

_STEP_S, _TOKEN_S = 60.0, 1.0
"""Announced to this client's deadlines: this machine may be slow, but it does not vanish."""
_IDLE_S = 60.0
"""Blocks that were not used for so long, while servers of the swarm were, are freed."""


@dataclass
class _Hosted:
    """Blocks that run here."""

    peer: str
    blocks: range
    served: Any
    """A `HostedBlocks` of the server's part."""
    used_at: float = field(default_factory=time.monotonic)


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
        self._lock = asyncio.Lock()
        # Of all models that share the connection.
        self._here = peers.transport if isinstance(peers.transport, _Rerouted) else _Rerouted(peers.transport)
        peers.transport = self._here
        # Nothing else ends the servers of a model that is gone.
        weakref.finalize(self, _abandon, self._hosted, self._here).atexit = False

    async def stand_in(self, blocks: range) -> str:
        """Loads blocks that no server holds, unless they are here already; returns the peer that serves them.

        Raises:
            CheckpointError: If the blocks cannot be read.
        """
        async with self._lock:
            for hosted in self._hosted.values():
                if blocks.start >= hosted.blocks.start and blocks.stop <= hosted.blocks.stop:
                    hosted.used_at = time.monotonic()
                    return hosted.peer
            log.warning("no server holds blocks %d:%d: they run here until one does", blocks.start, blocks.stop)
            hosted = await asyncio.to_thread(self._host, blocks)
            self._hosted[hosted.peer] = hosted
            self._here.handlers[hosted.peer] = hosted.served.handlers
            self._peers.deadlines.announce(hosted.peer, step_s=_STEP_S, token_s=_TOKEN_S * len(blocks))
            return hosted.peer

    def _host(self, blocks: range) -> _Hosted:
        # Loads what a server needs, now that this client has to be one.
        served = importlib.import_module("swarm_plugins.server.stand_in").host_blocks(self._open_checkpoint(), blocks)
        return _Hosted(new_identity().peer_id, blocks, served)

    def is_excluded(self, peer: str) -> bool:
        """Returns whether a peer must not be asked at all."""
        return peer not in self._hosted and self.inner.is_excluded(peer)

    def nonce(self) -> bytes:
        """Returns what to send as nonce of a request."""
        return self.inner.nonce()

    async def forward_done(self, call: ForwardCall) -> None:
        """Lets a forward be examined, unless it ran here."""
        if not await self._is_own(call.peer):
            await self.inner.forward_done(call)

    async def backward_done(self, call: BackwardCall) -> None:
        """Lets a backward be examined, unless it ran here."""
        if not await self._is_own(call.peer):
            await self.inner.backward_done(call)

    async def step_done(self, call: StepCall) -> None:
        """Lets a step be examined, unless it ran here."""
        if not await self._is_own(call.peer):
            await self.inner.step_done(call)

    async def _is_own(self, peer: str) -> bool:
        """Returns whether a call was answered here; if not, frees what the swarm has again."""
        now = time.monotonic()
        hosted = self._hosted.get(peer)
        if hosted is not None:
            hosted.used_at = now
            return True
        for one in list(self._hosted.values()):
            if now - one.used_at > _IDLE_S and one.served.is_idle:
                log.warning("servers hold blocks %d:%d again", one.blocks.start, one.blocks.stop)
                await self._free(one)
        return False

    async def _free(self, hosted: _Hosted) -> None:
        if await self._withdraw(hosted):
            await asyncio.to_thread(hosted.served.close)

    async def _withdraw(self, hosted: _Hosted) -> bool:
        """Lets no later request reach these blocks; returns whether they can be freed now."""
        # A backward whose graph was kept here replans.
        if self._hosted.pop(hosted.peer, None) is None:
            return False
        await self._here.end(hosted.peer)
        return True

    async def close(self) -> None:
        """Ends the server and frees the blocks. Idempotent."""
        await self.inner.close()
        for one in list(self._hosted.values()):
            if await self._withdraw(one):
                # Here: at the end of the interpreter, no thread takes new work.
                one.served.close()


def with_stand_in(observer: CallObserver, servers: Servers, open_checkpoint: Callable[[], Checkpoint]) -> CallObserver:
    """Returns an observer that also runs missing blocks here, if the client's settings ask for that."""
    if not servers.view.config.local_fallback:
        return observer
    return StandIn(observer, servers.peers, open_checkpoint)


def _abandon(hosted: dict[str, _Hosted], here: _Rerouted) -> None:
    """Frees blocks in the background: a garbage collector calls this."""
    for one in hosted.values():
        here.handlers.pop(one.peer, None)
        threading.Thread(target=one.served.close, name="free blocks").start()


class _Rerouted:
    """A transport that reaches the peers of this process through memory."""

    def __init__(self, inner: Transport) -> None:
        self.handlers: dict[str, Mapping[str, Handler]] = {}
        """By peer and rpc."""
        self._inner = inner
        self._streams = MemoryStreams()

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        """Opens a channel; see `Transport`."""
        if peer in self.handlers:
            return self._streams.open(peer, self.handlers[peer][rpc])
        return await self._inner.open(peer, rpc, timeout_s=timeout_s)

    async def end(self, peer: str) -> None:
        """Ends the streams of a peer of this process, which cannot be reached any more."""
        self.handlers.pop(peer, None)
        await self._streams.close(peer)

    async def close(self) -> None:
        """Closes the inner transport."""
        await self._inner.close()
