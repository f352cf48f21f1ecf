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

_MAX_RETIRED = 2
"""Replaced nodes that are kept while they are in use."""


class LastingNode:
    """A `SwarmNode` whose successors keep its key and its handlers; a `Network`.

    Args:
        node: The first node, not started.
    """

    def __init__(self, node: SwarmNode) -> None:
        self._node = node
        self._retired: list[SwarmNode] = []
        self._handlers: Mapping[str, Handler] = {}
        self._renewal: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._node.start()

    async def node(self) -> SwarmNode:
        """Returns the node in use; a new one if its daemon has died.

        Raises:
            TransportError: If none can be started.
        """
        if not self._node.is_alive:
            await self.renew()
        if not self._node.is_alive:
            # It shared an attempt that began while the node was alive, whose failure is not raised.
            await self.renew()
        return self._node

    async def renew(self, *, same_ports: bool = True) -> None:
        """Starts another node in place of the one in use, with the same ports if that is possible.

        One attempt serves all callers. A node that lives is replaced only by one that finds other peers.

        Raises:
            TransportError: If it cannot be started.
        """
        # Callers have deadlines of their own, which must not end the start in the middle.
        await asyncio.shield(self._attempt(same_ports))

    def _attempt(self, same_ports: bool = True) -> asyncio.Task[None]:
        """Returns the attempt that is under way, or a new one."""
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._replace(self._node, same_ports), name="start another node")
        return self._renewal

    async def _replace(self, node: SwarmNode, same_ports: bool) -> None:
        if not node.is_alive:
            log.warning("the libp2p daemon has died; starting a new one")
        try:
            newer = node.successor(same_ports=same_ports)
            await newer.start()
            try:
                if self._handlers:
                    await newer.serve(self._handlers)
            except BaseException:
                await newer.close()
                raise
        except TransportError:
            raise
        except SwarmError as exc:
            raise TransportError(f"cannot join the swarm again: {exc}") from exc
        if newer.is_alone and node.is_alive:
            await _close(newer)
            return
        self._node = newer
        # One that lives is closed at a later look-up: calls over it may be under way.
        self._retired.append(node)
        if not node.is_alive:
            await self._close_unused()

    @property
    def _in_use(self) -> list[SwarmNode]:
        return [node for node in self._retired if node.is_alive and node.num_opened]

    @property
    def is_crowded(self) -> bool:
        """Whether another replacement would close streams of an earlier node."""
        return len(self._in_use) >= _MAX_RETIRED

    async def _close_unused(self) -> None:
        """Closes replaced nodes, unless requests and sessions with peers that they still reach go on."""
        keep = self._in_use[-_MAX_RETIRED:]
        for node in [one for one in self._retired if one not in keep]:
            await _close(node)
            # Not before: what is interrupted here is closed with all others.
            if node in self._retired:
                self._retired.remove(node)

    @property
    def peer_id(self) -> str:
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
        return await (await self.node()).open(peer, rpc, timeout_s=timeout_s)

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        return await (await self.node()).servers(version, num_blocks)

    async def models(self) -> dict[str, ModelInfo]:
        return await (await self.node()).models()

    async def announce_run(self, run: bytes, ttl_s: float) -> None:
        """Announces that this node takes part in a run; see `SwarmDHT.announce_run`."""
        await (await self.node()).member.announce_run(run, ttl_s)

    async def run_peers(self, run: bytes) -> list[str]:
        return await (await self.node()).member.run_peers(run)

    async def close(self) -> None:
        renewal = self._renewal
        if renewal is not None:
            renewal.cancel()
            await asyncio.wait({renewal})
        retired, self._retired = self._retired, []
        await _close(*retired, self._node)


async def _close(*nodes: SwarmNode) -> None:
    for node in nodes:
        with contextlib.suppress(SwarmError):
            await node.close()
