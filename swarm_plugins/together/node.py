"""The network node of a peer of a run: reached by the other peers, and replaced when its libp2p daemon has died."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from swarm_plugins.errors import ConfigError, SwarmError
from swarm_plugins.together.blobs import RPC
from swarm_plugins.transport.channel import Channel, Handler
from swarm_plugins.transport.config import NodeConfig
from swarm_plugins.transport.identity import Identity
from swarm_plugins.transport.node import SwarmNode

log = logging.getLogger(__name__)

_MOST_AHEAD_S = 30.0
"""Records live for two minutes."""


class RunNode:
    """Opens channels to peers, lists them, and answers them.

    Args:
        config: Settings of the node.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._node = SwarmNode(config)
        self._renewal: asyncio.Task[None] | None = None
        self._handler: Handler | None = None

    async def start(self) -> Identity:
        """Joins the swarm; returns the key pair of the node.

        Raises:
            ConfigError: If an address or the identity cannot be used, or this machine's clock is wrong.
            TransportError: If no initial peer can be reached.
        """
        await self._node.start()
        ahead_s = await self._node.clock_ahead_s()
        if abs(ahead_s) > _MOST_AHEAD_S:
            raise ConfigError(
                f"this machine's clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the swarm's "
                f"(at most {_MOST_AHEAD_S:g} s is allowed): peers would take each other's records for expired; set the "
                "clock, and start again"
            )
        return self._node.identity

    async def serve(self, handler: Handler) -> None:
        """Answers other peers from now on."""
        self._handler = handler
        await self._node.serve({RPC: handler})

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        """Opens a channel; see [`Opener`][swarm_plugins.transport.channel.Opener]."""
        return await (await self._living()).open(peer, rpc, timeout_s=timeout_s)

    async def announce_run(self, run: bytes, ttl_s: float) -> None:
        """Announces that this node takes part in a run."""
        await (await self._living()).announce_run(run, ttl_s)

    async def run_peers(self, run: bytes) -> list[str]:
        """Returns the ids of the peers of a run."""
        return await (await self._living()).run_peers(run)

    async def close(self) -> None:
        """Leaves the swarm. Idempotent."""
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.wait({self._renewal})
        await self._node.close()

    async def _living(self) -> SwarmNode:
        if self._node.is_alive:
            return self._node
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew(), name="start another node for a run")
        # Callers have deadlines of their own, which must not end the start in the middle.
        await asyncio.shield(self._renewal)
        return self._node

    async def _renew(self) -> None:
        dead = self._node
        log.warning("the libp2p daemon of this peer has died; starting a new one")
        node = dead.successor()
        await node.start()
        if self._handler is not None:
            await node.serve({RPC: self._handler})
        self._node = node
        with contextlib.suppress(SwarmError):
            await dead.close()
