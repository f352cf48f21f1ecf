"""Nodes on loopback that serve an echo."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.node import NodeConfig, SwarmNode
from swarm_plugins.transport.server_info import ServerInfo

INFO = ServerInfo(version="v1", model="m", num_blocks=8, start=0, end=4, dtype="float32", quantization="none")


async def echo(channel: Channel) -> None:
    while (received := await channel.receive(timeout_s=30.0)) is not None:
        await channel.send(received)


@asynccontextmanager
async def server(*initial_peers: str, known_peers: tuple[str, ...] = (), **settings: Any) -> AsyncIterator[SwarmNode]:
    async with SwarmNode(NodeConfig(initial_peers=initial_peers, **settings), known_peers=known_peers) as node:
        await node.serve({"rpc_forward": echo})
        yield node


@asynccontextmanager
async def client(*initial_peers: str, **settings: Any) -> AsyncIterator[SwarmNode]:
    async with SwarmNode(NodeConfig(initial_peers=initial_peers, host_maddrs=(), **settings)) as node:
        yield node
