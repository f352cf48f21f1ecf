"""Surveys a swarm: finds the servers in the DHT and asks each for its state."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec

from swarm_plugins.errors import ProtocolError, TransportError, one_line
from swarm_plugins.routing import expert_gaps
from swarm_plugins.transport.config import NodeConfig
from swarm_plugins.transport.node import SwarmNode
from swarm_plugins.transport.reach.static import ask_info
from swarm_plugins.transport.server_info import ServerInfo

_MAX_AT_ONCE = 16


@dataclass(frozen=True)
class ServerStatus:
    """One server."""

    peer: str
    info: ServerInfo
    """Its present state; its last announcement if it cannot be reached."""
    is_reachable: bool
    reason: str = ""
    """Why it cannot be reached, or its answer is not believed."""
    quarantine: str = ""
    """Why clients of this user leave it out; empty: they do not."""

    @property
    def is_online(self) -> bool:
        """Whether this user's clients ask it to compute: a quarantined one covers no block."""
        return self.is_reachable and self.info.state == "online" and not self.quarantine


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
            if server.is_online and server.info.experts is None:
                for block in range(server.info.start, server.info.end):
                    counts[block] += 1
        return counts

    @property
    def missing(self) -> list[int]:
        """Blocks without a server."""
        return [block for block, count in enumerate(self.coverage) if count == 0]

    @property
    def missing_experts(self) -> list[tuple[range, range]]:
        """``(blocks, experts)`` that servers of these blocks need and no holder has."""
        infos = [server.info for server in self.servers if server.is_online]
        held = [(range(one.start, one.end), range(*one.experts), one.slice) for one in infos if one.experts is not None]
        needs = {need for info in infos for need in info.needs}
        gaps = {
            (gap.start, gap.stop, few.start, few.stop)
            for start, end, first, last in needs
            for gap, few in expert_gaps(held, range(start, end), range(first, last))
        }
        return [(range(start, end), range(first, last)) for start, end, first, last in sorted(gaps)]

    def as_dict(self) -> dict[str, Any]:
        """Returns everything in JSON's types."""
        return {
            "version": self.version,
            "model": self.model,
            "num_blocks": self.num_blocks,
            "coverage": self.coverage,
            "missing_blocks": self.missing,
            "missing_experts": [
                {"blocks": [blocks.start, blocks.stop], "experts": [experts.start, experts.stop]}
                for blocks, experts in self.missing_experts
            ],
            "servers": [
                {
                    "peer": server.peer,
                    "is_reachable": server.is_reachable,
                    "reason": server.reason,
                    "quarantine": server.quarantine,
                    **msgspec.structs.asdict(server.info),
                }
                for server in self.servers
            ],
        }


async def survey(
    config: NodeConfig,
    wanted: str | None,
    *,
    timeout_s: float,
    quarantined: Mapping[str, str] = MappingProxyType({}),
) -> list[ModelStatus]:
    """Returns all model versions whose version or name contains ``wanted``, with their servers.

    Args:
        config: How to reach the swarm, as a client.
        wanted: Part of a version or of a model's name. None: all versions.
        timeout_s: Longest wait for one server.
        quarantined: Why some peers are left out.

    Raises:
        TransportError: If the swarm cannot be reached.
    """
    async with SwarmNode(config) as node:
        return await survey_node(node, wanted, timeout_s=timeout_s, quarantined=quarantined)


async def survey_node(
    node: SwarmNode,
    wanted: str | None,
    *,
    timeout_s: float,
    quarantined: Mapping[str, str] = MappingProxyType({}),
) -> list[ModelStatus]:
    """Surveys a swarm from a node that is open, as `survey` does."""
    found = []
    gate = asyncio.Semaphore(_MAX_AT_ONCE)
    for version, model in sorted((await node.models()).items()):
        if wanted is not None and wanted not in version and wanted not in model.model:
            continue
        announced = await node.servers(version, model.num_blocks)
        servers = await asyncio.gather(*(_ask(node, gate, peer, info, timeout_s) for peer, info in announced.items()))
        servers = [replace(server, quarantine=quarantined.get(server.peer, "")) for server in servers]
        ordered = sorted(servers, key=lambda server: (server.info.start, server.info.end, server.peer))
        found.append(ModelStatus(version, model.model, model.num_blocks, ordered))
    return found


async def _ask(
    node: SwarmNode, gate: asyncio.Semaphore, peer: str, announced: ServerInfo, timeout_s: float
) -> ServerStatus:
    try:
        async with gate:
            answer = await ask_info(node, peer, timeout_s=timeout_s)
        # A server that still loads announces itself but serves nothing yet, which is not a fault.
        if answer.num_blocks != announced.num_blocks:
            raise ProtocolError(f"it announced a model of {announced.num_blocks} blocks, and says {answer.num_blocks}")
    except TransportError as exc:
        return ServerStatus(peer, announced, is_reachable=False, reason=one_line(exc))
    return ServerStatus(peer, answer, is_reachable=True)
