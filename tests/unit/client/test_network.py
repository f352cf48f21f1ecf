"""A client whose own node dies goes on with another one."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest

from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.connection import SwarmConnection
from swarm_plugins.client.network import LastingNetwork
from swarm_plugins.errors import TransportError
from swarm_plugins.testing.transports import LocalTransport


class Node(LocalTransport):
    def __init__(self) -> None:
        super().__init__({})
        self.is_alive = True
        self.is_alone = False
        self.num_closed = 0

    async def close(self) -> None:
        self.num_closed += 1
        await super().close()


def test_a_dead_node_is_replaced_once_and_closed() -> None:
    started: list[Node] = []

    async def start() -> Node:
        started.append(Node())
        return started[-1]

    async def body() -> None:
        network = LastingNetwork(start)
        await network.start()
        assert await network.servers("v", 4) == {}
        assert len(started) == 1
        started[0].is_alive = False
        await asyncio.gather(*(network.servers("v", 4) for _ in range(5)))
        assert len(started) == 2
        await network.close()
        await network.close()
        assert [node.num_closed for node in started] == [1, 1]

    asyncio.run(asyncio.wait_for(body(), 10))


def test_a_node_that_sees_nobody_is_replaced_when_another_can_join() -> None:
    started: list[Node] = []
    can_join = True

    async def start() -> Node:
        if not can_join:
            raise TransportError("none of the initial peers can be reached")
        started.append(Node())
        return started[-1]

    async def body() -> None:
        nonlocal can_join
        network = LastingNetwork(start)
        await network.start()
        started[0].is_alone, can_join = True, False
        with pytest.raises(TransportError, match="none of the initial peers"):
            await network.servers("v", 4)
        assert started[0].num_closed == 0
        can_join = True
        await asyncio.gather(*(network.servers("v", 4) for _ in range(5)))
        assert [node.num_closed for node in started] == [1, 0]
        await network.close()

    asyncio.run(asyncio.wait_for(body(), 10))


def test_a_node_that_cannot_start_again_is_a_transport_error() -> None:
    nodes = [Node()]

    async def start() -> Node:
        if not nodes:
            raise TransportError("none of the initial peers can be reached")
        return nodes.pop()

    async def body() -> None:
        network = LastingNetwork(start)
        first = nodes[0]
        await network.start()
        first.is_alive = False
        with pytest.raises(TransportError, match="none of the initial peers"):
            await network.open("p", "rpc_info", timeout_s=1.0)

    asyncio.run(asyncio.wait_for(body(), 10))


def test_a_connection_that_nothing_refers_to_closes_itself() -> None:
    node = Node()

    async def start() -> Node:
        return node

    others = set(threading.enumerate())

    def threads() -> list[str]:
        return [one.name for one in threading.enumerate() if one not in others]

    connection = SwarmConnection(start, SwarmConfig()).start()
    assert "swarm-client" in threads()
    del connection
    gc.collect()
    deadline = time.monotonic() + 20
    while "swarm-client" in threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "swarm-client" not in threads()
    assert node.num_closed == 1
