"""A client's network node, replaced when its libp2p daemon has died, has lost all peers or refuses to call one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from swarm_plugins.errors import SwarmError
from swarm_plugins.transport.channel import BackoffError, Channel
from swarm_plugins.transport.lasting import LastingNode
from swarm_plugins.transport.node import SwarmNode
from swarm_plugins.transport.records import ModelInfo
from swarm_plugins.transport.server_info import ServerInfo

log = logging.getLogger(__name__)

T = TypeVar("T")

_RENEWAL_PAUSE_S = 1.0
_LONGEST_RENEWAL_PAUSE_S = 2.0
"""Between two attempts with a new node: longer after the first, as the lost peer may be gone for good."""
_CALM_S = 10.0
"""After so long without an attempt, the next one belongs to another outage."""
_NEWS_S = 300.0
"""Between two warnings: clients call a lost server until its announcement has expired."""


class LastingNetwork(LastingNode):
    """A node that is also replaced when it is of no use any more, so that long runs survive outages.

    libp2p waits longer and longer, minutes at last, before it calls a lost peer again; a new node calls at once.
    """

    def __init__(self, node: SwarmNode) -> None:
        super().__init__(node)
        self._tried_at = float("-inf")
        self._said_at = float("-inf")
        self._pause_s = _RENEWAL_PAUSE_S

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        node = await self.node()
        try:
            return await node.open(peer, rpc, timeout_s=timeout_s)
        except BackoffError:
            if self.is_crowded:
                raise
            newer = await self._instead_of(node, timeout_s)
            if newer is node:
                raise
            return await newer.open(peer, rpc, timeout_s=timeout_s)

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        return await self._look_up(lambda node: node.servers(version, num_blocks))

    async def models(self) -> dict[str, ModelInfo]:
        return await self._look_up(lambda node: node.models())

    async def _look_up(self, ask: Callable[[SwarmNode], Awaitable[dict[str, T]]]) -> dict[str, T]:
        node = await self.node()
        await self._close_unused()
        found = await ask(node)
        if found or not node.is_alone:
            return found
        newer = await self._instead_of(node, None)
        return found if newer is node else await ask(newer)

    async def _instead_of(self, node: SwarmNode, timeout_s: float | None) -> SwarmNode:
        """Returns a newer node if there is one by then, else the same."""
        if self._node is node and time.monotonic() - self._tried_at > self._pause_s:
            await asyncio.wait({self._attempt()}, timeout=timeout_s)
        return self._node

    async def _replace(self, node: SwarmNode, same_ports: bool) -> None:
        if not node.is_alive:
            await super()._replace(node, same_ports)
            return
        is_first = time.monotonic() - self._tried_at > _CALM_S
        try:
            await super()._replace(node, same_ports)
            if self._node is not node:
                is_news = time.monotonic() - self._said_at > _NEWS_S
                if is_news:
                    self._said_at = time.monotonic()
                log.log(
                    logging.WARNING if is_news else logging.DEBUG,
                    "this client cannot reach some peers; it has joined the swarm anew to call them again",
                )
        except SwarmError as exc:
            log.debug("cannot join again: %s", exc)
        finally:
            self._pause_s = _RENEWAL_PAUSE_S if is_first else min(2 * self._pause_s, _LONGEST_RENEWAL_PAUSE_S)
            self._tried_at = time.monotonic()
