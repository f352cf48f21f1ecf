"""One client's connection to a swarm, shared by all models that use it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from torch import Tensor

from swarm_plugins.block_io import CacheOp, LoadedAdapter, SpanInputs, SpanOutputs
from swarm_plugins.book.record import PeerBook
from swarm_plugins.borders import NO_TIES
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.counts import ClientCounts
from swarm_plugins.client.discovery.network import LastingNetwork
from swarm_plugins.client.discovery.view import Fallback, SwarmView
from swarm_plugins.client.peers import Peers
from swarm_plugins.client.servers import Guard, Servers
from swarm_plugins.client.sessions.session import ClientSession
from swarm_plugins.client.training.autograd import run_batch
from swarm_plugins.client.training.batch import BatchCall
from swarm_plugins.client.training.norms import weight_norms
from swarm_plugins.errors import SwarmError
from swarm_plugins.routing import Demand
from swarm_plugins.transport.channel import Network
from swarm_plugins.transport.config import NodeConfig
from swarm_plugins.transport.local import LocalRoutes
from swarm_plugins.transport.loop import LoopThread
from swarm_plugins.transport.node import SwarmNode
from swarm_plugins.transport.reach.addresses import check_peer_ids
from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)


class SwarmConnection:
    """Event loop thread, network node and open streams of one client.

    Args:
        open_network: Starts the network; called on the loop by `start`.
        config: Deadlines, retries, codec.
        initial_peers: Addresses the swarm is joined by; for messages.
    """

    def __init__(
        self,
        open_network: Callable[[], Coroutine[Any, Any, Network]],
        config: SwarmConfig,
        *,
        initial_peers: tuple[str, ...] = (),
    ) -> None:
        self.config = config
        self.initial_peers = initial_peers
        self.loop = LoopThread()
        self.network: Network | None = None
        self.local: LocalRoutes | None = None
        """Peers of this process."""
        self.peers: Peers | None = None
        self.counts = ClientCounts()
        """What it has done so far; for monitors."""
        self._open_network = open_network
        self._lock = threading.Lock()
        # Weak: a model that is gone must not keep its checks alive.
        self._helpers: weakref.WeakSet[Guard | Fallback] = weakref.WeakSet()
        self._leaving: weakref.finalize[Any, SwarmConnection] | None = None

    def start(self) -> SwarmConnection:
        """Starts the network. Idempotent.

        Raises:
            TransportError: If the network does not start or no initial peer answers.
        """
        with self._lock:
            if self.peers is None:
                self.loop.start()
                try:
                    self.network = self.loop.run(self._open_network())
                except BaseException:
                    self.loop.close()
                    raise
                self.counts.streams = self.network.counts
                self.local = LocalRoutes(self.network)
                self.peers = Peers(self.local, self.config, self.counts)
                # The thread and the daemon would outlive the last model that uses them.
                self._leaving = weakref.finalize(self, _leave, self.loop, self._helpers, self.peers, self.network)
                self._leaving.atexit = False
        return self

    def close(self) -> None:
        """Closes all streams and stops the network and the loop. Idempotent."""
        with self._lock:
            peers, self.peers = self.peers, None
            network, self.network = self.network, None
            if self._leaving is not None:
                self._leaving.detach()
            parts: list[Guard | Fallback | Peers | Network | None] = [*self._helpers, peers, network]
            for part in parts:
                if part is not None:
                    try:
                        self.loop.run(part.close())
                    except SwarmError as exc:
                        log.debug("could not leave the swarm cleanly: %s", exc)
            self.loop.close()

    def __enter__(self) -> SwarmConnection:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def blocks(
        self,
        *,
        version: ModelVersion,
        num_blocks: int,
        tied: Collection[int] = NO_TIES,
        model: str | None = None,
        make_guard: Callable[[PeerBook], Guard] | None = None,
        serve_here: Callable[[LocalRoutes, PeerBook], Fallback] | None = None,
    ) -> RemoteBlocks:
        """Returns the blocks of one model version; starts the network if need be.

        Args:
            version: The model version.
            num_blocks: Blocks of the whole model.
            tied: Blocks that run on the server of the block before; see `swarm_plugins.borders`.
            model: The model's directory or id, as its user wrote it; for messages.
            make_guard: Makes what examines answers. None: all are believed.
            serve_here: Makes what serves blocks in this process that no server has. None: such blocks are missing.

        Raises:
            TransportError: If the network does not start or no initial peer answers.
        """
        self.start()
        if self.local is None or self.peers is None:
            raise SwarmError("another thread has just closed this connection to the swarm: load the model again")
        guard = None if make_guard is None else make_guard(self.peers.book)
        fallback = None if serve_here is None else serve_here(self.local, self.peers.book)
        self._helpers.update(helper for helper in (guard, fallback) if helper is not None)
        return RemoteBlocks(
            self, version=version, num_blocks=num_blocks, tied=tied, model=model, guard=guard, fallback=fallback
        )


def _leave(loop: LoopThread, helpers: Collection[Guard | Fallback], peers: Peers, network: Network) -> None:
    """Closes the parts of a connection that nothing refers to, in the background: a garbage collector calls this."""

    async def close() -> None:
        parts: list[Guard | Fallback | Peers | Network] = [*helpers, peers, network]
        for part in parts:
            try:
                await part.close()
            except SwarmError as exc:
                log.debug("could not leave the swarm cleanly: %s", exc)
        asyncio.get_running_loop().stop()

    def start_closing() -> None:
        with contextlib.suppress(SwarmError):
            loop.submit(close())

    loop.call_soon(start_closing)


class RemoteBlocks:
    """All blocks of one model version, wherever they run: forward with gradients, and sessions.

    Args:
        connection: A started connection.
        version: The model version.
        num_blocks: Blocks of the whole model.
        tied: Blocks that run on the server of the block before; see `swarm_plugins.borders`.
        model: The model's directory or id, as its user wrote it; for messages.
        guard: Examines answers. None: all are believed.
        fallback: Serves blocks that no server has.
    """

    def __init__(
        self,
        connection: SwarmConnection,
        *,
        version: ModelVersion,
        num_blocks: int,
        tied: Collection[int] = NO_TIES,
        model: str | None = None,
        guard: Guard | None = None,
        fallback: Fallback | None = None,
    ) -> None:
        if connection.peers is None or connection.network is None:
            raise SwarmError("the connection is not started: call start() first")
        self.connection = connection
        self._loop = connection.loop
        self.view = SwarmView(
            connection.network,
            connection.peers,
            connection.config,
            version=version,
            num_blocks=num_blocks,
            model=model,
            initial_peers=connection.initial_peers,
            excludes=lambda peer: guard is not None and guard.is_excluded(peer),
            fallback=fallback,
            tied=tied,
        )
        self.servers = Servers(connection.peers, self.view, guard)

    def check(self, blocks: range | None = None) -> None:
        """Raises MissingBlocksError if one of ``blocks`` (None: of all) has no living server."""
        self._loop.run(self.view.chain(range(self.view.num_blocks) if blocks is None else blocks, Demand()))

    def forward(self, inputs: SpanInputs) -> SpanOutputs:
        """Runs blocks without a session; differentiable in hidden states, adapter tensors and prefix.

        Raises:
            MissingBlocksError: If no living server holds some block.
            SwarmError: If a server refuses the request, or too many servers failed.
        """
        return run_batch(self._loop, BatchCall(self.servers, inputs, keep=inputs.needs_gradient))

    def weight_norms(self, adapter: LoadedAdapter, blocks: range) -> dict[tuple[int, str], Tensor]:
        """Returns the norms that an adapter's layers start from, ``[out]``, by block and path of the module.

        Raises:
            MissingBlocksError: If no living server holds some block.
            SwarmError: If a server refuses, or too many servers failed.
        """
        return self._loop.run(weight_norms(self.servers, adapter, blocks))

    def open_session(self, blocks: range, prefix: Sequence[Tensor] = ()) -> ClientSession:
        """Returns a new session; servers open it at its first step."""
        return ClientSession(self.servers, blocks=blocks, prefix=prefix)

    def step(self, session: ClientSession, inputs: SpanInputs, ops: Sequence[CacheOp]) -> SpanOutputs:
        """Applies queued cache changes to a session, then runs new tokens in it.

        Raises:
            MissingBlocksError: If no living server holds some block.
            SwarmError: If a server refuses the step, or too many servers failed.
        """
        return self._loop.run(session.step(inputs, ops))

    def fork(self, session: ClientSession) -> ClientSession:
        """Returns an independent copy of a session."""
        return self._loop.run(session.fork())

    def release(self, session: ClientSession) -> None:
        """Closes a session in the background; safe to call from a garbage collector."""

        def start_closing() -> None:
            with contextlib.suppress(SwarmError):
                self._loop.submit(session.close())

        self._loop.call_soon(start_closing)


_connections: weakref.WeakValueDictionary[tuple[tuple[str, ...], SwarmConfig], SwarmConnection] = (
    weakref.WeakValueDictionary()
)
_connections_lock = threading.Lock()


def connect(initial_peers: Sequence[str], config: SwarmConfig) -> SwarmConnection:
    """Returns the connection through some peers that already exists, or a new one (not started yet).

    Raises:
        ConfigError: If an address, the id of an allowed peer, or the file of the identity or the secret is wrong.
    """
    addresses = tuple(initial_peers)
    with _connections_lock:
        known = _connections.get((addresses, config))
        if known is None:
            # Made and checked now: a model that is loaded first would report it minutes later.
            check_peer_ids(config.allowed_peers or ())
            # Nodes of the DHT need not be among the servers that are allowed.
            node = config.node(initial_peers=addresses, allowed_peers=None, host_maddrs=())
            node.check_files()
            known = SwarmConnection(lambda: _open_lasting(node), config, initial_peers=addresses)
            _connections[addresses, config] = known
        return known


async def _open_lasting(config: NodeConfig) -> Network:
    network = LastingNetwork(SwarmNode(config))
    await network.start()
    return network


_of_parent: list[SwarmConnection] = []


def _forget_in_child() -> None:
    """Makes a forked process open its own connections."""
    global _connections_lock
    _connections_lock = threading.Lock()
    # Never collected: hivemind ends the daemon, which belongs to the parent, with the object that started it.
    _of_parent.extend(_connections.values())
    _connections.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


@atexit.register
def _close_all() -> None:
    for connection in list(_connections.values()):
        connection.close()
