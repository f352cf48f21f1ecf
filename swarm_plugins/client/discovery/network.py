"""A client's network node, replaced when its libp2p daemon has died, has lost all peers or refuses to call one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from swarm_plugins.errors import SwarmError
from swarm_plugins.transport.channel import BackoffError, Channel
from swarm_plugins.transport.lasting import LastingNode
from swarm_plugins.transport.node import SwarmNode
from swarm_plugins.transport.records import ModelInfo
from swarm_plugins.transport.server_info import ServerInfo

log = logging.getLogger(__name__)

_RENEWAL_PAUSE_S = 1.0
_LONGEST_RENEWAL_PAUSE_S = 2.0
"""Between two attempts with a new node: longer after the first, as the lost peer may be gone for good."""
_CALM_S = 10.0
"""After so long without an attempt, the next one belongs to another outage."""
_NEWS_S = 300.0
"""Between two warnings: clients call a lost server until its announcement has expired."""
_MAX_RETIRED = 2
"""Replaced nodes that are kept while streams are open in them."""


class LastingNetwork(LastingNode):
    """A node that is also replaced when it is of no use any more, so that long runs survive outages.

    libp2p waits longer and longer, minutes at last, before it calls a lost peer again; a new node calls at once.
    """

    def __init__(self, node: SwarmNode) -> None:
        super().__init__(node)
        self._retired: list[SwarmNode] = []
        self._attempt: asyncio.Task[None] | None = None
        self._tried_at = float("-inf")
        self._said_at = float("-inf")
        self._pause_s = _RENEWAL_PAUSE_S

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        """Opens a channel; see `Transport`."""
        node = await self.node()
        try:
            return await node.open(peer, rpc, timeout_s=timeout_s)
        except BackoffError:
            newer = await self._instead_of(node, timeout_s)
            if newer is node:
                raise
            return await newer.open(peer, rpc, timeout_s=timeout_s)

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        """Returns the servers of a model version; see `Directory`."""
        node = await self.node()
        await self._close_unused()
        found = await node.servers(version, num_blocks)
        if found or not node.is_alone:
            return found
        newer = await self._instead_of(node, None)
        return found if newer is node else await newer.servers(version, num_blocks)

    async def models(self) -> dict[str, ModelInfo]:
        """Returns all announced model versions, by version."""
        node = await self.node()
        found = await node.models()
        if found or not node.is_alone:
            return found
        newer = await self._instead_of(node, None)
        return found if newer is node else await newer.models()

    async def _instead_of(self, node: SwarmNode, timeout_s: float | None) -> SwarmNode:
        """Returns a newer node if there is one by then, else the same; one attempt at a time serves all callers."""
        if self._node is node and self._attempt is None and time.monotonic() - self._tried_at > self._pause_s:
            self._attempt = asyncio.create_task(self._try(node), name="start another node")
        if self._attempt is not None:
            await asyncio.wait({self._attempt}, timeout=timeout_s)
        return self._node

    async def _try(self, node: SwarmNode) -> None:
        """Starts another node, which replaces this one if it finds any peer."""
        is_first = time.monotonic() - self._tried_at > _CALM_S
        try:
            newer = await self._started_successor()
            if newer.is_alone or self._node is not node:
                await newer.close()
                return
            self._node = newer
            # Requests and sessions with peers that it still reaches go on.
            self._retired.append(node)
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
            self._attempt = None

    async def _close_unused(self) -> None:
        keep = [node for node in self._retired if node.is_alive and node.num_opened][-_MAX_RETIRED:]
        unused = [node for node in self._retired if node not in keep]
        self._retired = keep
        await _close(unused)

    async def close(self) -> None:
        """Leaves the network. Idempotent."""
        attempt = self._attempt
        if attempt is not None:
            attempt.cancel()
            await asyncio.wait({attempt})
        retired, self._retired = self._retired, []
        await _close(retired)
        await super().close()


async def _close(nodes: list[SwarmNode]) -> None:
    for node in nodes:
        with contextlib.suppress(SwarmError):
            await node.close()
