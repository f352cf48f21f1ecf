"""A server's place in the swarm: its node, its announcements, and a new node when the libp2p daemon dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from swarm_plugins.errors import SwarmError, TransportError
from swarm_plugins.ledger import Ledger
from swarm_plugins.transport.channel import Channel, Handler
from swarm_plugins.transport.config import NodeConfig
from swarm_plugins.transport.counts import StreamCounts
from swarm_plugins.transport.identity import Identity
from swarm_plugins.transport.node import SwarmNode
from swarm_plugins.transport.server_info import ServerInfo

log = logging.getLogger(__name__)

_MAX_RESTARTS = 5
"""Restarts of the daemon in a row; a daemon that lives for ``_STABLE_S`` resets the count."""
_STABLE_S = 300.0
_TTL_PERIODS = 3
"""An announcement outlives the next two."""
_SAME_PORTS = 2
"""Restarts with the ports that the system chose before; then it may choose others."""
_RETRACT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 10.0


class Presence:
    """Keeps a server reachable and announced."""

    def __init__(self, config: NodeConfig, *, every_s: float, ledger: Ledger | None = None) -> None:
        self._every_s = every_s
        self._ttl_s = _TTL_PERIODS * every_s
        self._node = SwarmNode(config, ledger=ledger)
        self._handlers: Mapping[str, Handler] = {}
        self._info: Callable[[], ServerInfo] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._is_lost = asyncio.Event()

    @property
    def peer_id(self) -> str:
        """Base58 id of this peer."""
        return self._node.peer_id

    @property
    def counts(self) -> StreamCounts:
        """What the streams have carried so far, over all nodes."""
        return self._node.counts

    @property
    def identity(self) -> Identity:
        """The key pair behind the peer id; a daemon that is started again keeps it."""
        return self._node.identity

    async def addresses(self) -> tuple[str, ...]:
        """Returns the addresses by which others reach this peer."""
        return await self._node.addresses()

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        """Returns the servers of a model version."""
        return await self._node.servers(version, num_blocks)

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        """Opens a stream to another peer; see `Transport`."""
        return await self._node.open(peer, rpc, timeout_s=timeout_s)

    async def wait_lost(self) -> None:
        """Returns when the network is lost and could not be joined again."""
        await self._is_lost.wait()

    async def start(self) -> None:
        """Joins the swarm."""
        await self._node.start()

    async def announce(self, info: Callable[[], ServerInfo]) -> None:
        """Announces the result of ``info``, now and regularly until ``close``."""
        self._info = info
        await self._node.announce(info(), self._ttl_s)
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name="keep the server announced")

    async def serve(self, handlers: Mapping[str, Handler]) -> None:
        """Answers requests from now on."""
        self._handlers = handlers
        await self._node.serve(handlers)

    async def retract(self) -> None:
        """Leaves the DHT; requests are still answered."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            # It may be joining again; leaving must not depend on how that ends.
            await asyncio.wait([keeper], timeout=_CLOSE_TIMEOUT_S)
        if self._node.is_alive:
            try:
                async with asyncio.timeout(_RETRACT_TIMEOUT_S):
                    await self._node.retract()
            except (SwarmError, TimeoutError) as error:
                log.warning("cannot retract the announcement, it expires by itself: %s", error)

    async def close(self) -> None:
        """Leaves the swarm. Idempotent."""
        await self.retract()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._node.close()
        except TimeoutError:
            log.warning("the node did not close within %.0f s; it ends with the process", _CLOSE_TIMEOUT_S)

    async def _keep(self) -> None:
        restarts = 0
        while True:
            started = asyncio.get_running_loop().time()
            await self._announce_while_alive()
            if asyncio.get_running_loop().time() - started > _STABLE_S:
                restarts = 0
            log.error("the libp2p daemon has died; joining the swarm again")
            while not await self._rejoin(same_ports=restarts < _SAME_PORTS):
                restarts += 1
                if restarts > _MAX_RESTARTS:
                    log.error("gave up after %d attempts to join the swarm again", restarts)
                    self._is_lost.set()
                    return
                await asyncio.sleep(min(30.0, 2.0**restarts))

    async def _announce_while_alive(self) -> None:
        dead = asyncio.create_task(self._node.wait_dead(), name="watch the libp2p daemon")
        try:
            while self._node.is_alive:
                await asyncio.wait([dead], timeout=self._every_s)
                if dead.done() or self._info is None:
                    return
                try:
                    await self._node.announce(self._info(), self._ttl_s)
                except TransportError as error:
                    log.warning("cannot announce, trying again in %.0f s: %s", self._every_s, error)
        finally:
            dead.cancel()
            await asyncio.gather(dead, return_exceptions=True)

    async def _rejoin(self, *, same_ports: bool) -> bool:
        """Starts a node with the same key, and the same ports if possible, by which others know this server."""
        try:
            node = self._node.successor(same_ports=same_ports)
        except SwarmError as error:
            log.warning("cannot rejoin the swarm: %s", error)
            return False
        try:
            await node.start()
            await node.serve(self._handlers)
            if self._info is not None:
                await node.announce(self._info(), self._ttl_s)
        except SwarmError as error:
            log.warning("cannot rejoin the swarm: %s", error)
            await node.close()
            return False
        dead, self._node = self._node, node
        await dead.close()
        return True
