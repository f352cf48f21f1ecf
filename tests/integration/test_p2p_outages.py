"""Nodes find each other again after outages in which hivemind forgets them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from p2p_kit import INFO, client, echo

from swarm_plugins.client.discovery.network import LastingNetwork
from swarm_plugins.errors import SwarmError
from swarm_plugins.server.presence import Presence
from swarm_plugins.transport.channel import Directory
from swarm_plugins.transport.identity import new_identity
from swarm_plugins.transport.node import NodeConfig, SwarmNode

pytestmark = pytest.mark.swarm

CURE_S = 60.0
"""Deadline for a node to work again; it takes a second or two on an idle machine."""


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


async def test_a_client_sees_the_servers_again_that_were_all_frozen() -> None:
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


async def test_a_look_up_asks_frozen_nodes_at_the_same_time_not_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with SwarmNode() as first, client(*await first.addresses()) as looking:
        await first.announce(INFO, 60.0)
        assert looking._dht is not None
        protocol = looking._dht._dht.protocol
        call_find, waiting, all_wait = protocol.call_find, set(), asyncio.Event()
        for _ in range(8):
            protocol.routing_table.add_or_update_node(DHTID.generate(), PeerID.from_base58(new_identity().peer_id))

        async def call(peer: PeerID, keys: list[DHTID]) -> object:
            if peer.to_base58() == first.peer_id:
                return await call_find(peer, keys)
            waiting.add(peer)
            if len(waiting) == 8:
                all_wait.set()
            await all_wait.wait()
            return None

        monkeypatch.setattr(protocol, "call_find", call)
        assert set(await looking.servers("v1", 8)) == {first.peer_id}
        assert all_wait.is_set()


async def test_a_client_sees_a_server_again_that_was_restarted(tmp_path: Path) -> None:
    identity = tmp_path / "id"
    async with SwarmNode(NodeConfig(identity=identity)) as server:
        peers = await server.addresses()
        await server.announce(INFO, 60.0)

        network = LastingNetwork(SwarmNode(NodeConfig(initial_peers=peers, host_maddrs=())))
        await network.start()
        assert await sees(network, server.peer_id)
        # A living node, too, is replaced by one that knows others as soon as it has started.
        before = await network.node()
        assert await network._instead_of(before, CURE_S) is not before
    try:
        # Calls in vain, after each of which libp2p waits longer.
        for _ in range(5):
            with contextlib.suppress(SwarmError):
                await network.servers("v1", 8)
            await asyncio.sleep(0.5)
        host = peers[0].rpartition("/p2p/")[0]
        async with SwarmNode(NodeConfig(identity=identity, host_maddrs=(host,))) as server:
            await server.announce(INFO, 60.0)
            assert await sees(network, server.peer_id)
    finally:
        await network.close()


async def test_servers_that_lost_each_other_are_one_swarm_again() -> None:
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
                    assert neighbors(node) == 0
            await second.announce(INFO, 60.0)
            async with client(*await second.addresses()) as looking:
                assert await sees(looking, first.peer_id, second.peer_id)


@contextlib.asynccontextmanager
async def presence(*initial_peers: str) -> AsyncIterator[Presence]:
    """A server as `swarm serve` keeps it in the swarm, without blocks."""
    server = Presence(SwarmNode(NodeConfig(initial_peers=initial_peers)), every_s=1.0)
    await server.start()
    try:
        await server.serve({"rpc_forward": echo})
        await server.announce(lambda: INFO)
        yield server
    finally:
        await server.close()


async def answers(network: LastingNetwork, peer: str) -> bool:
    """Opens streams to a server until it answers on one."""
    deadline = time.monotonic() + CURE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(SwarmError):
            channel = await network.open(peer, "rpc_forward", timeout_s=2.0)
            await channel.send(INFO)
            if await channel.receive(timeout_s=2.0) is not None:
                await channel.close()
                return True
        await asyncio.sleep(0.1)
    return False


async def until_killed(node: SwarmNode) -> None:
    assert node._daemon is not None
    psutil.Process(node._daemon.pid).kill()
    await asyncio.wait_for(node.wait_dead(), CURE_S)


async def test_killed_daemons_come_back_under_their_names_and_no_server_is_an_island() -> None:
    async with presence() as first, presence(*await first.addresses()) as second:
        peers = await first.addresses()
        both = (first.peer_id, second.peer_id)
        found = {server: await server.addresses() for server in (first, second)}

        network = LastingNetwork(SwarmNode(NodeConfig(initial_peers=peers, host_maddrs=())))
        await network.start()
        assert await sees(network, *both)
        try:
            for server in (first, second):
                await until_killed(server._node)
                for _ in range(3):  # in vain, so that libp2p refuses to call
                    with contextlib.suppress(SwarmError):
                        await network.open(server.peer_id, "rpc_forward", timeout_s=2.0)
                assert await answers(network, server.peer_id)
                assert await sees(network, *both)
                assert server.peer_id in both
                assert await server.addresses() == found[server]
                async with client(*await server.addresses()) as newcomer:
                    assert await sees(newcomer, *both)
            node = network._node
            assert isinstance(node, SwarmNode)
            name = node.peer_id
            await until_killed(node)
            assert await answers(network, first.peer_id)
            assert await sees(network, *both)
            assert isinstance(network._node, SwarmNode)
            assert network._node.peer_id == name
        finally:
            await network.close()
