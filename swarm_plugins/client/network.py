"""A client's network node, replaced when its libp2p daemon has died or has lost all peers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from swarm_plugins.errors import SwarmError
from swarm_plugins.transport.channel import Channel, Directory, Transport
from swarm_plugins.transport.messages import ServerInfo

log = logging.getLogger(__name__)


class Network(Transport, Directory, Protocol):
    """Opens channels and looks up servers."""


class Node(Network, Protocol):
    """A network that can die: a `SwarmNode`."""

    @property
    def is_alive(self) -> bool:
        """Whether its daemon runs."""
        ...

    @property
    def is_alone(self) -> bool:
        """Whether none of the peers that it knew answers any more."""
        ...


class LastingNetwork:
    """A network that replaces its node when that has died or has lost all peers, so that long runs survive outages.

    libp2p waits longer and longer, minutes at last, before it calls a lost peer again; a new node calls at once.
    """

    def __init__(self, start_node: Callable[[], Awaitable[Node]]) -> None:
        self._start_node = start_node
        self._node: Node | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Starts the first node."""
        await self._living()

    async def _living(self) -> Node:
        async with self._lock:
            if self._node is not None and not self._node.is_alive:
                log.warning("the libp2p daemon of this client has died; starting a new one")
                dead, self._node = self._node, None
                with contextlib.suppress(SwarmError):
                    await dead.close()
            if self._node is None:
                self._node = await self._start_node()
            return self._node

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        """Opens a channel; see `Transport`."""
        return await (await self._living()).open(peer, rpc, timeout_s=timeout_s)

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        """Returns the servers of a model version; see `Directory`."""
        node = await self._living()
        found = await node.servers(version, num_blocks)
        if found or not node.is_alone:
            return found
        return await (await self._instead_of(node)).servers(version, num_blocks)

    async def _instead_of(self, alone: Node) -> Node:
        """Starts a new node; the old one stays if that finds nobody either."""
        async with self._lock:
            if self._node is alone:
                self._node = await self._start_node()
                log.warning("this client had lost all its peers; it has joined the swarm again")
                with contextlib.suppress(SwarmError):
                    await alone.close()
            return self._node or alone

    async def close(self) -> None:
        """Leaves the network. Idempotent."""
        async with self._lock:
            node, self._node = self._node, None
            if node is not None:
                await node.close()
