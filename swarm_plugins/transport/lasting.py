"""A node of the swarm that lasts: another takes its place when its libp2p daemon has died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from swarm_plugins.errors import SwarmError, TransportError
from swarm_plugins.transport.channel import Channel, Handler
from swarm_plugins.transport.counts import StreamCounts
from swarm_plugins.transport.identity import Identity
from swarm_plugins.transport.node import SwarmNode
from swarm_plugins.transport.records import ModelInfo
from swarm_plugins.transport.server_info import ServerInfo

log = logging.getLogger(__name__)


class LastingNode:
    """A `SwarmNode` whose successors keep its key and its handlers; a `Transport` and a `Directory`.

    Args:
        node: The first node, not started.
    """

    def __init__(self, node: SwarmNode) -> None:
        self._node = node
        self._handlers: Mapping[str, Handler] = {}
        self._renewal: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the first node."""
        await self._node.start()

    async def node(self) -> SwarmNode:
        """Returns the node in use; a new one if its daemon has died.

        Raises:
            TransportError: If none can be started.
        """
        if not self._node.is_alive:
            await self.renew()
        return self._node

    async def renew(self, *, same_ports: bool = True) -> None:
        """Starts another node in place of a dead one, with the same ports if that is possible; one attempt serves all.

        Raises:
            TransportError: If it cannot be started.
        """
        if self._renewal is None or self._renewal.done():
            if self._node.is_alive:
                return
            self._renewal = asyncio.create_task(self._replace_dead(same_ports), name="start another node")
        # Callers have deadlines of their own, which must not end the start in the middle.
        await asyncio.shield(self._renewal)

    async def _replace_dead(self, same_ports: bool) -> None:
        log.warning("the libp2p daemon has died; starting a new one")
        dead = self._node
        node = await self._started_successor(same_ports=same_ports)
        # Meanwhile another one may have taken its place.
        unused, self._node = (dead, node) if self._node is dead else (node, self._node)
        with contextlib.suppress(SwarmError):
            await unused.close()

    async def _started_successor(self, *, same_ports: bool = True) -> SwarmNode:
        """Returns a running successor of the node in use; raises TransportError if it does not start."""
        try:
            node = self._node.successor(same_ports=same_ports)
            await node.start()
            try:
                if self._handlers:
                    await node.serve(self._handlers)
            except BaseException:
                await node.close()
                raise
        except TransportError:
            raise
        except SwarmError as exc:
            raise TransportError(f"cannot join the swarm again: {exc}") from exc
        return node

    @property
    def peer_id(self) -> str:
        """Base58 id of this peer."""
        return self._node.peer_id

    @property
    def identity(self) -> Identity:
        """The key pair behind the peer id, which all nodes share."""
        return self._node.identity

    @property
    def counts(self) -> StreamCounts:
        """What the streams of all nodes have carried so far."""
        return self._node.counts

    async def serve(self, handlers: Mapping[str, Handler]) -> None:
        """Answers requests from now on."""
        self._handlers = handlers
        await self._node.serve(handlers)

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        """Opens a channel; see `Transport`."""
        return await (await self.node()).open(peer, rpc, timeout_s=timeout_s)

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        """Returns the servers of a model version; see `Directory`."""
        return await (await self.node()).servers(version, num_blocks)

    async def models(self) -> dict[str, ModelInfo]:
        """Returns all announced model versions, by version."""
        return await (await self.node()).models()

    async def announce_run(self, run: bytes, ttl_s: float) -> None:
        """Announces that this node takes part in a run; see `SwarmDHT.announce_run`."""
        await (await self.node()).member.announce_run(run, ttl_s)

    async def run_peers(self, run: bytes) -> list[str]:
        """Returns the ids of the peers of a run."""
        return await (await self.node()).member.run_peers(run)

    async def close(self) -> None:
        """Leaves the swarm. Idempotent."""
        renewal = self._renewal
        if renewal is not None:
            renewal.cancel()
            await asyncio.wait({renewal})
        with contextlib.suppress(SwarmError):
            await self._node.close()
