"""Asks the swarm what it serves: the DHT who, the servers themselves how they are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from swarm_plugins.errors import ProtocolError, TransportError
from swarm_plugins.transport.messages import InfoRequest, ServerInfo
from swarm_plugins.transport.node import NodeConfig, SwarmNode
from swarm_plugins.transport.records import check_server_info

__all__ = ["ModelStatus", "ServerStatus", "runs", "survey"]

_MAX_AT_ONCE = 16


@dataclass(frozen=True)
class ServerStatus:
    """One server."""

    peer: str
    info: ServerInfo
    """What it says now; what it last announced if it cannot be reached."""
    is_reachable: bool


@dataclass(frozen=True)
class ModelStatus:
    """One model version and its servers."""

    version: str
    model: str
    num_blocks: int
    servers: Sequence[ServerStatus]

    @property
    def coverage(self) -> list[int]:
        """Servers that hold each block, online and reachable."""
        counts = [0] * self.num_blocks
        for server in self.servers:
            if server.is_reachable and server.info.state == "online":
                for block in range(server.info.start, server.info.end):
                    counts[block] += 1
        return counts

    @property
    def missing(self) -> list[int]:
        """Blocks that nobody serves."""
        return [block for block, count in enumerate(self.coverage) if count == 0]


async def survey(initial_peers: tuple[str, ...], wanted: str | None, *, timeout_s: float) -> list[ModelStatus]:
    """Returns all model versions whose version or name contains ``wanted``, with their servers.

    Raises:
        TransportError: If the swarm cannot be reached.
    """
    async with SwarmNode(NodeConfig(initial_peers=initial_peers, client_mode=True)) as node:
        found = []
        gate = asyncio.Semaphore(_MAX_AT_ONCE)
        for version, model in sorted((await node.models()).items()):
            if wanted is not None and wanted not in version and wanted not in model.model:
                continue
            announced = await node.servers(version, model.num_blocks)
            servers = await asyncio.gather(
                *(_ask(node, gate, peer, info, timeout_s) for peer, info in announced.items())
            )
            ordered = sorted(servers, key=lambda server: (server.info.start, server.info.end, server.peer))
            found.append(ModelStatus(version, model.model, model.num_blocks, ordered))
        return found


async def _ask(
    node: SwarmNode, gate: asyncio.Semaphore, peer: str, announced: ServerInfo, timeout_s: float
) -> ServerStatus:
    async with gate:
        try:
            channel = await node.open(peer, "rpc_info", timeout_s=timeout_s)
            try:
                await channel.send(InfoRequest())
                answer = await channel.receive(timeout_s=timeout_s)
            finally:
                await channel.close()
        except TransportError:
            answer = None
    if not isinstance(answer, ServerInfo) or answer.num_blocks != announced.num_blocks:
        # A server that still loads announces itself, but serves nothing yet: that is no fault.
        return ServerStatus(peer, announced, is_reachable=False)
    try:
        check_server_info(answer)
    except ProtocolError:
        return ServerStatus(peer, announced, is_reachable=False)
    return ServerStatus(peer, answer, is_reachable=True)


def runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Returns sorted indices as ranges ``(start, end)``, end excluded."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        if found and found[-1][1] == block:
            found[-1] = (found[-1][0], block + 1)
        else:
            found.append((block, block + 1))
    return found
