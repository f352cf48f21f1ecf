"""A client whose own node dies goes on with another one."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
import virtual_time

from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.connection import SwarmConnection
from swarm_plugins.client.discovery.network import LastingNetwork
from swarm_plugins.errors import ConfigError, TransportError
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.channel import BackoffError, Channel


class Node(LocalTransport):
    """A node whose successors are in ``made``; ``lost`` says whether they find nobody."""

    def __init__(self, made: list[Node], *, lost: bool = False) -> None:
        super().__init__({})
        self.made = made
        self.is_alive = True
        self.is_alone = False
        self.num_opened = 0
        self.num_closed = 0
        self.can_start = True
        self.lost = lost
        self.backoff = False

    def successor(self, *, same_ports: bool = True) -> Node:
        self.made.append(Node(self.made, lost=self.lost))
        self.made[-1].can_start = self.can_start
        return self.made[-1]

    async def start(self) -> None:
        if not self.can_start:
            raise ConfigError("the port is taken")
        self.is_alone = self.lost

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        if self.backoff:
            raise BackoffError("all dials failed * dial backoff")
        return await super().open(peer, rpc, timeout_s=timeout_s)

    async def close(self) -> None:
        self.num_closed += 1
        await super().close()


Body = Callable[[LastingNetwork, list[Node]], Awaitable[None]]


def run(body: Body) -> None:
    async def main() -> None:
        made: list[Node] = []
        made.append(Node(made))
        network = LastingNetwork(made[0])  # type: ignore[arg-type]
        await network.start()
        try:
            await body(network, made)
        finally:
            await network.close()
            await network.close()
        assert all(node.num_closed for node in made)

    virtual_time.run(main(), timeout_s=60)


def test_a_dead_node_is_replaced_once_and_closed() -> None:
    async def body(network: LastingNetwork, made: list[Node]) -> None:
        assert await network.servers("v", 4) == {}
        assert len(made) == 1
        made[0].is_alive = False
        await asyncio.gather(*(network.servers("v", 4) for _ in range(5)))
        assert [node.num_closed for node in made] == [1, 0]
        assert await network.node() is made[1]

    run(body)


def test_a_node_that_sees_nobody_is_replaced_once_another_sees_somebody() -> None:
    async def body(network: LastingNetwork, made: list[Node]) -> None:
        made[0].is_alone = made[0].lost = True
        await asyncio.gather(*(network.servers("v", 4) for _ in range(5)), network.models())
        assert [node.num_closed for node in made] == [0, 1]
        made[0].lost, network._tried_at = False, float("-inf")
        await asyncio.gather(*(network.servers("v", 4) for _ in range(5)))
        await network.servers("v", 4)
        assert [node.num_closed for node in made] == [1, 1, 0]

    run(body)


def test_a_peer_that_the_node_refuses_to_call_is_called_by_a_new_one_while_streams_of_the_old_go_on() -> None:
    async def body(network: LastingNetwork, made: list[Node]) -> None:
        made[0].backoff, made[0].num_opened = True, 1
        with pytest.raises(TransportError, match="peer p cannot be reached, or does not serve rpc_info"):
            await network.open("p", "rpc_info", timeout_s=1.0)
        await network.servers("v", 4)
        assert [node.num_closed for node in made] == [0, 0]
        made[0].num_opened = 0
        await network.servers("v", 4)
        assert [node.num_closed for node in made] == [1, 0]

    run(body)


def test_no_node_is_replaced_while_that_would_end_sessions_of_an_earlier_one() -> None:
    async def fail_to_call(network: LastingNetwork, node: Node) -> None:
        node.backoff, node.num_opened = True, 1
        network._tried_at = float("-inf")
        with pytest.raises(TransportError):
            await network.open("p", "rpc_info", timeout_s=1.0)
        await network.servers("v", 4)

    async def body(network: LastingNetwork, made: list[Node]) -> None:
        for _ in range(4):
            await fail_to_call(network, made[-1])
        assert [node.num_closed for node in made] == [0, 0, 0]
        made[0].num_opened = 0
        await fail_to_call(network, made[-1])
        assert [node.num_closed for node in made] == [1, 0, 0, 0]

    run(body)


def test_a_peer_that_is_gone_for_good_costs_ever_fewer_nodes(caplog: pytest.LogCaptureFixture) -> None:
    async def body(network: LastingNetwork, made: list[Node]) -> None:
        pauses = []
        for _ in range(4):
            made[-1].backoff = True
            for _ in range(3):  # the second and third within the pause
                with pytest.raises(TransportError):
                    await network.open("gone", "rpc_forward", timeout_s=5)
                made[-1].backoff = True
            pauses.append(network._pause_s)
            network._tried_at -= network._pause_s
        assert pauses == [1.0, 2.0, 2.0, 2.0]
        assert len(made) == 5
        for said_s, times in ((60.0, 1), (301.0, 2)):
            network._tried_at -= 60.0
            network._said_at -= said_s
            made[-1].backoff = True
            with pytest.raises(TransportError):
                await network.open("gone", "rpc_forward", timeout_s=5)
            assert len([one for one in caplog.records if "joined the swarm anew" in one.message]) == times
        assert len(made) == 7

    run(body)


async def test_a_node_that_starts_slowly_holds_up_no_other_call() -> None:
    class Slow(Node):
        def successor(self, *, same_ports: bool = True) -> Node:
            node = super().successor()
            node.start = lambda: asyncio.sleep(60)  # type: ignore[method-assign]
            return node

    slow = Slow([])
    network = LastingNetwork(slow)  # type: ignore[arg-type]
    await network.start()
    slow.is_alone = True
    looking = asyncio.create_task(network.servers("v", 4))
    await asyncio.sleep(0.05)
    slow.backoff = True
    with pytest.raises(BackoffError):
        await network.open("p", "rpc_info", timeout_s=0.1)
    looking.cancel()
    await network.close()


def test_a_node_that_cannot_start_again_is_a_transport_error() -> None:
    async def body(network: LastingNetwork, made: list[Node]) -> None:
        made[0].is_alive = made[0].can_start = False
        with pytest.raises(TransportError, match="cannot join the swarm again: the port is taken"):
            await network.open("p", "rpc_info", timeout_s=1.0)
        made[1].num_closed = 1  # a node that does not start closes itself

    run(body)


def test_a_connection_that_nothing_refers_to_closes_itself() -> None:
    node = Node([])

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
