"""Lines of a local swarm in a process of their own, so that they do not compete for one interpreter."""

from __future__ import annotations

import asyncio
import selectors
import sys

import msgspec

from recipes.benchmarks.links.link import Link
from recipes.benchmarks.links.network import MAX_SERVERS, Network, Traffic
from swarm_plugins.child import Child, answer
from swarm_plugins.errors import ConfigError
from swarm_plugins.local_swarm.lines import Ports

_ANSWER_S = 60.0


class _Setup(msgspec.Struct, frozen=True):
    num_servers: int
    link: Link
    server_link: Link


class _Order(msgspec.Struct, frozen=True):
    """Answered by the traffic."""

    admit: int | None = None
    shut: bool = False


def check_num_servers(num_servers: int) -> None:
    """Raises ConfigError if there are too many servers for links."""
    if num_servers > MAX_SERVERS:
        raise ConfigError(f"{num_servers} servers are too many for links: at most {MAX_SERVERS}")


class Relay:
    """Puts a `LocalSwarm` at a distance: ``LocalSwarm(..., link=Relay(Link(rtt_ms=100, mbit=100)))``.

    Args:
        link: Between clients and servers, and between servers.
        server_link: Between servers, if it differs.
    """

    def __init__(self, link: Link, server_link: Link | None = None) -> None:
        self._links = link, server_link or link
        self._child = Child(__name__, "the relay")

    def start(self, num_servers: int) -> Ports:
        """Starts the process and begins to listen; returns where.

        Raises:
            ConfigError: If there are too many servers.
        """
        check_num_servers(num_servers)
        self._child.start()
        self._child.send(_Setup(num_servers, *self._links))
        return self._child.receive(Ports, timeout_s=_ANSWER_S)

    def close(self) -> None:
        """Ends the process and all connections. Idempotent."""
        self._child.close()

    def traffic(self) -> Traffic:
        """Returns what was carried so far."""
        return self._ask(_Order())

    def admit(self, server: int) -> None:
        """Lets a server connect to the others; see `Network`."""
        self._ask(_Order(admit=server))

    def shut(self) -> None:
        """Lets clients connect, and servers no more; see `Network`."""
        self._ask(_Order(shut=True))

    def _ask(self, order: _Order) -> Traffic:
        self._child.send(order)
        return self._child.receive(Traffic, timeout_s=_ANSWER_S)


def main() -> None:
    """Runs the process: reads a setup, answers with the ports, then follows orders."""
    # Other selectors round to milliseconds.
    loop = asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector()))
    with loop:
        loop.run(_relay())


async def _relay() -> None:
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Setup)
    network = Network(setup.num_servers, setup.link, setup.server_link)
    try:
        await network.start()
        answer(network.ports())
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            order = msgspec.json.decode(line, type=_Order)
            if order.admit is not None:
                network.admit(order.admit)
            if order.shut:
                network.shut()
            answer(network.traffic())
    finally:
        await network.close()
