"""A swarm of one fake server per peer, for tests of what the client does when servers fail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import pytest
import virtual_time
from client_kit import VERSION, server_info

from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.discovery.view import SwarmView
from swarm_plugins.client.peers import Peers
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.channel import Channel, Handler
from swarm_plugins.transport.messages import Message
from swarm_plugins.transport.server_info import ServerInfo

Answer = Callable[[Message], Message]


def answering(answer: Answer) -> Handler:
    """Returns a handler that answers each message."""

    async def handle(channel: Channel) -> None:
        while (message := await channel.receive(timeout_s=10.0)) is not None:
            await channel.send(answer(message))

    return handle


class RunInSwarm(Protocol):
    def __call__(
        self,
        servers: dict[str, tuple[tuple[int, int], Answer]],
        use: Callable[[Peers, SwarmView], Awaitable[None]],
        *,
        num_blocks: int,
        max_retries: int = 3,
    ) -> None: ...


@pytest.fixture
def run_in_swarm() -> RunInSwarm:
    """Runs a coroutine with the client's side of a swarm: ``(span, what it answers)`` of each peer."""

    def run(
        servers: dict[str, tuple[tuple[int, int], Answer]],
        use: Callable[[Peers, SwarmView], Awaitable[None]],
        *,
        num_blocks: int,
        max_retries: int = 3,
    ) -> None:
        async def main() -> None:
            config = SwarmConfig(max_retries=max_retries, request_timeout_s=10.0)
            transport = LocalTransport(
                {peer: _handlers(server_info(*span, num_blocks), answer) for peer, (span, answer) in servers.items()}
            )
            peers = Peers(transport, config)
            view = SwarmView(transport, peers, config, version=VERSION, num_blocks=num_blocks)
            try:
                await use(peers, view)
            finally:
                await peers.close()
                await transport.close()

        virtual_time.run(main(), timeout_s=60)

    return run


def _handlers(info: ServerInfo, answer: Answer) -> dict[str, Handler]:
    rpcs = ("rpc_forward", "rpc_backward", "rpc_session", "rpc_adapter")
    return {"rpc_info": answering(lambda _: info), **{rpc: answering(answer) for rpc in rpcs}}
