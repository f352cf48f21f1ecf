"""Servers of one made-up model version: what they say of themselves, and a swarm of fake ones."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.discovery.view import SwarmView
from swarm_plugins.client.peers import Peers
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.channel import Channel, Handler
from swarm_plugins.transport.messages import Message
from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.versions import ModelVersion

VERSION = ModelVersion("tiny", "a" * 40)


def server_info(start: int, end: int, num_blocks: int, **figures: Any) -> ServerInfo:
    return ServerInfo(
        version=VERSION.key,
        model=VERSION.name,
        num_blocks=num_blocks,
        start=start,
        end=end,
        dtype="float32",
        quantization="none",
        free_kv_tokens=1000,
        **{"throughput": 1e6, **figures},
    )


Answer = Callable[[Message], Message]


def answering(answer: Answer) -> Handler:
    """Returns a handler that answers each message."""

    async def handle(channel: Channel) -> None:
        while (message := await channel.receive(timeout_s=10.0)) is not None:
            await channel.send(answer(message))

    return handle


@contextlib.asynccontextmanager
async def in_swarm(
    servers: dict[str, tuple[tuple[int, int], Answer]], *, num_blocks: int, max_retries: int = 3
) -> AsyncIterator[tuple[Peers, SwarmView]]:
    """The client's side of a swarm of one fake server per peer: ``(span, what it answers)`` of each."""
    config = SwarmConfig(max_retries=max_retries, request_timeout_s=10.0)
    transport = LocalTransport(
        {peer: _handlers(server_info(*span, num_blocks), answer) for peer, (span, answer) in servers.items()}
    )
    peers = Peers(transport, config)
    try:
        yield peers, SwarmView(transport, peers, config, version=VERSION, num_blocks=num_blocks)
    finally:
        await peers.close()
        await transport.close()


def _handlers(info: ServerInfo, answer: Answer) -> dict[str, Handler]:
    rpcs = ("rpc_forward", "rpc_backward", "rpc_session", "rpc_adapter")
    return {"rpc_info": answering(lambda _: info), **{rpc: answering(answer) for rpc in rpcs}}
