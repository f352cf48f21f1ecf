"""Surveys a swarm: finds the servers in the DHT, asks each for its state, and names the commands that fill gaps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import msgspec

from swarm_plugins.checkpoint.copies import LocalCopies
from swarm_plugins.client.discovery.missing import serve_command
from swarm_plugins.errors import ProtocolError, TransportError, one_line
from swarm_plugins.routing import expert_gaps
from swarm_plugins.routing.coverage import spread_sample
from swarm_plugins.transport.channel import Directory, Opener
from swarm_plugins.transport.config import NodeConfig
from swarm_plugins.transport.node import SwarmNode
from swarm_plugins.transport.reach.static import ask_info
from swarm_plugins.transport.records import ModelInfo
from swarm_plugins.transport.server_info import ServerInfo

_MAX_AT_ONCE = 16


@runtime_checkable
class Surveyed(Opener, Directory, Protocol):
    """A node to survey a swarm from."""

    async def models(self) -> dict[str, ModelInfo]:
        """Returns all announced model versions, by version."""
        ...


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
    round_trip_s: float | None = None
    """Seconds from asking it to its answer, with a new stream; None: it has not answered."""

    @property
    def is_online(self) -> bool:
        """Whether this user's clients ask it to compute: a quarantined one covers no block."""
        return self.is_reachable and self.info.state == "online" and not self.quarantine

    def as_dict(self) -> dict[str, Any]:
        """Returns everything in JSON's types."""
        return {
            "peer": self.peer,
            "is_reachable": self.is_reachable,
            "reason": self.reason,
            "quarantine": self.quarantine,
            "round_trip_s": self.round_trip_s,
            **msgspec.structs.asdict(self.info),
        }


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
            "servers": [server.as_dict() for server in self.servers],
        }


@dataclass(frozen=True)
class Joining:
    """Writes the commands by which servers join a swarm."""

    initial_peers: Sequence[str] = ()
    discovery: str = "dht"
    secret_file: Path | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    """What this user calls some versions, by version."""
    copies: LocalCopies = field(default_factory=LocalCopies)

    def source(self, one: ModelStatus) -> str:
        """Returns the model as `swarm serve` takes it, or ``PATH/TO/NAME``; it may take seconds, once."""
        if one.version in self.names or not one.version.startswith("local-"):
            return self.names.get(one.version, one.model)
        # Servers announce the name of a directory, not where it is.
        return str(self.copies.find(one.model, one.version) or f"PATH/TO/{one.model}")

    def command(self, one: ModelStatus, blocks: range | None, experts: range | None = None) -> str:
        """Returns the command that serves blocks, or experts of them; without ``blocks``, those the swarm lacks."""
        return serve_command(
            self.source(one),
            one.version,
            blocks,
            self.initial_peers,
            without=[server.peer for server in one.servers if not server.is_reachable],
            experts=experts,
            discovery=self.discovery,
            secret_file=self.secret_file,
        )


async def survey(
    config: NodeConfig,
    wanted: str | None,
    *,
    timeout_s: float,
    within_s: float | None = None,
    quarantined: Mapping[str, str] = MappingProxyType({}),
) -> list[ModelStatus]:
    """Returns all model versions whose version or name contains ``wanted``, with their servers.

    Args:
        config: How to reach the swarm, as a client.
        wanted: Part of a version or of a model's name. None: all versions.
        timeout_s: Longest wait for one server.
        within_s: Longest wait for all servers; see `survey_node`.
        quarantined: Why some peers are left out.

    Raises:
        TransportError: If the swarm cannot be reached.
    """
    async with SwarmNode(config) as node:
        return await survey_node(node, wanted, timeout_s=timeout_s, within_s=within_s, quarantined=quarantined)


async def survey_node(
    node: Surveyed,
    wanted: str | None,
    *,
    timeout_s: float,
    within_s: float | None = None,
    quarantined: Mapping[str, str] = MappingProxyType({}),
    max_models: int | None = None,
    max_servers: int | None = None,
) -> list[ModelStatus]:
    """Surveys a swarm from a node that is open, as `survey` does.

    Args:
        node: The node.
        wanted: Part of a version or of a model's name. None: all versions.
        timeout_s: Longest wait for one server.
        within_s: Longest wait for all servers; those that have not answered then count as unreachable. None: no bound.
        quarantined: Why some peers are left out.
        max_models: Most versions; of more, those with the most servers. None: all.
        max_servers: Most servers of a version; of more, a sample that holds every block. None: all.

    Raises:
        TransportError: If the swarm cannot be asked.
    """
    gate = asyncio.Semaphore(_MAX_AT_ONCE)
    models = {
        version: model
        for version, model in (await node.models()).items()
        if wanted is None or wanted in version or wanted in model.model
    }
    largest = sorted(models, key=lambda version: models[version].num_servers, reverse=True)[:max_models]
    announced = await asyncio.gather(*(_find(node, gate, one, models[one].num_blocks, max_servers) for one in largest))
    infos = dict(zip(largest, announced, strict=True))
    # Versions take turns, so that many dead servers of one do not delay the others.
    turns = sorted((turn, version, peer) for version, known in infos.items() for turn, peer in enumerate(known))
    deadline = None if within_s is None else asyncio.get_running_loop().time() + within_s
    asked = await asyncio.gather(
        *(_ask(node, gate, peer, infos[version][peer], timeout_s, deadline) for _, version, peer in turns)
    )
    servers: dict[str, list[ServerStatus]] = {version: [] for version in sorted(largest)}
    for (_, version, peer), server in zip(turns, asked, strict=True):
        servers[version].append(replace(server, quarantine=quarantined.get(peer, "")))
    for found in servers.values():
        found.sort(key=lambda one: (one.info.start, one.info.end, one.peer))
    return [
        ModelStatus(version, models[version].model, models[version].num_blocks, found)
        for version, found in servers.items()
    ]


async def _find(
    node: Surveyed, gate: asyncio.Semaphore, version: str, num_blocks: int, max_servers: int | None
) -> dict[str, ServerInfo]:
    async with gate:
        announced = await node.servers(version, num_blocks)
    if max_servers is None:
        return announced
    spans = {peer: range(info.start, info.end) for peer, info in announced.items()}
    return {peer: announced[peer] for peer in spread_sample(spans, max_servers)}


async def _ask(
    node: Opener,
    gate: asyncio.Semaphore,
    peer: str,
    announced: ServerInfo,
    timeout_s: float,
    deadline: float | None,
) -> ServerStatus:
    late = "not asked in time: many other servers do not answer"
    try:
        async with asyncio.timeout_at(deadline), gate:
            late = "no answer in time"
            started = time.perf_counter()
            answer = await ask_info(node, peer, timeout_s=timeout_s)
            round_trip_s = time.perf_counter() - started
        # A server that still loads announces itself but serves nothing yet, which is not a fault.
        if answer.num_blocks != announced.num_blocks:
            raise ProtocolError(f"it announced a model of {announced.num_blocks} blocks, and says {answer.num_blocks}")
        # Of a server that serves this version as well, the blocks of this version.
        served = answer.of(announced.version)
        if served is None:
            raise ProtocolError(f"it announced version {announced.version}, and now serves {answer.version}")
    except TransportError as exc:
        return ServerStatus(peer, announced, is_reachable=False, reason=one_line(exc))
    except TimeoutError:
        return ServerStatus(peer, announced, is_reachable=False, reason=late)
    return ServerStatus(peer, served, is_reachable=True, round_trip_s=round_trip_s)
