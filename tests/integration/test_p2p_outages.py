"""Nodes find each other again after outages in which hivemind forgets them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from p2p_kit import INFO, client, run

from swarm_plugins.client.network import LastingNetwork
from swarm_plugins.errors import SwarmError
from swarm_plugins.transport.channel import Directory
from swarm_plugins.transport.node import NodeConfig, SwarmNode

pytestmark = pytest.mark.swarm

CURE_S = 10.0
"""Deadline for a node to work again; it takes a second or two."""


@contextlib.asynccontextmanager
async def frozen(*nodes: SwarmNode) -> AsyncIterator[None]:
    """Stops the daemons of nodes for a while, as a paused machine does."""
    daemons = [psutil.Process(node._daemon.pid) for node in nodes if node._daemon is not None]
    for daemon in daemons:
        daemon.suspend()
    try:
        yield
    finally:
        for daemon in daemons:
            daemon.resume()


async def sees(node: Directory, *servers: str) -> bool:
    """Looks up the servers until they are those."""
    deadline = time.monotonic() + CURE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(SwarmError):
            if set(await node.servers("v1", 8)) == set(servers):
                return True
        await asyncio.sleep(0.1)
    return False


def neighbors(node: SwarmNode) -> int:
    return len(node._dht._dht.protocol.routing_table.uid_to_peer_id)


def test_a_client_sees_the_servers_again_that_were_all_frozen() -> None:
    async def body() -> None:
        async with SwarmNode() as first:
            peers = await first.addresses()
            async with SwarmNode(NodeConfig(initial_peers=peers)) as second, client(*peers) as looking:
                await first.announce(INFO, 60.0)
                await second.announce(INFO, 60.0)
                assert await sees(looking, first.peer_id, second.peer_id)
                async with frozen(first, second):
                    deadline = time.monotonic() + 30.0
                    while neighbors(looking) and time.monotonic() < deadline:
                        with contextlib.suppress(SwarmError):
                            await looking.servers("v1", 8)
                    assert neighbors(looking) == 0
                assert await sees(looking, first.peer_id, second.peer_id)

    run(body)


def test_a_client_sees_a_server_again_that_was_restarted(tmp_path: Path) -> None:
    identity = tmp_path / "id"

    async def body() -> None:
        async with SwarmNode(NodeConfig(identity_path=identity)) as server:
            peers = await server.addresses()
            await server.announce(INFO, 60.0)

            async def join() -> SwarmNode:
                node = SwarmNode(NodeConfig(initial_peers=peers, client_mode=True))
                await node.start()
                return node

            network = LastingNetwork(join)
            assert await sees(network, server.peer_id)
        try:
            # Calls in vain, after each of which libp2p waits longer.
            for _ in range(5):
                with contextlib.suppress(SwarmError):
                    await network.servers("v1", 8)
                await asyncio.sleep(0.5)
            host = peers[0].rpartition("/p2p/")[0]
            async with SwarmNode(NodeConfig(identity_path=identity, host_maddrs=(host,))) as server:
                await server.announce(INFO, 60.0)
                assert await sees(network, server.peer_id)
        finally:
            await network.close()

    run(body)


def test_servers_that_lost_each_other_are_one_swarm_again() -> None:
    async def body() -> None:
        async with SwarmNode() as first:
            peers = await first.addresses()
            async with SwarmNode(NodeConfig(initial_peers=peers)) as second:
                await first.announce(INFO, 60.0)
                await second.announce(INFO, 60.0)
                for node, other in ((first, second), (second, first)):
                    async with frozen(other):
                        deadline = time.monotonic() + 30.0
                        while neighbors(node) and time.monotonic() < deadline:
                            with contextlib.suppress(SwarmError):
                                await node.servers("v1", 8)
                assert neighbors(first) == neighbors(second) == 0
                await second.announce(INFO, 60.0)
                async with client(*await second.addresses()) as looking:
                    assert await sees(looking, first.peer_id, second.peer_id)

    run(body)
