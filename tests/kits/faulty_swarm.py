"""A local swarm of processes whose connections and answers can be made to fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.benchmarks.links import Link
from recipes.benchmarks.links.line import Line
from recipes.benchmarks.links.network import Network
from swarm_plugins.local_swarm import LocalSwarm, Ports
from swarm_plugins.transport.loop import LoopThread

LYING_SERVER = Path(__file__).with_name("lying_server.py")
"""A program: the ``swarm`` command, whose server lies."""


class _LinesHere:
    """Lines in this process."""

    network: Network
    _loop: LoopThread | None = None

    def start(self, num_servers: int) -> Ports:
        self.network = Network(num_servers, Link(), Link())
        loop = self._loop = LoopThread("swarm-links")
        loop.start()
        loop.run(self.network.start())
        return self.network.ports()

    def admit(self, server: int) -> None:
        self.network.admit(server)

    def shut(self) -> None:
        self.network.shut()

    def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.run(self.network.close())
            loop.close()


class FaultySwarm(LocalSwarm):
    """A `LocalSwarm` whose lines run in this process, to be cut and slowed at any time."""

    _num_replaced = 0

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._lines = _LinesHere()
        super().__init__(*args, link=self._lines, **settings)

    def lines_to(self, index: int) -> list[Line]:
        """Returns the lines by which others call a server; what a `Line` names an answer comes from the server."""
        network = self._lines.network
        callers = (lines[index] for at, lines in enumerate(network.for_servers) if at != index)
        return [network.for_clients[index], *callers]

    def lines_from(self, index: int) -> list[Line]:
        """Returns the lines by which a server calls others; what a `Line` names an answer goes to the server."""
        return [line for at, line in enumerate(self._lines.network.for_servers[index]) if at != index]

    def replace_by_liar(self, index: int) -> None:
        """Ends a server at once and starts, behind its lines, one with a new identity, whose outputs are wrong by 1 %.

        `restart` brings the honest one back. Clients notice only if they check answers (``SwarmConfig(verify="on")``):
        those of a swarm on their own machine do not by default.
        """
        self._num_replaced += 1
        identity = self.folder / f"liar-{self._num_replaced}.key"
        self._replace(index, {"identity": identity}, program=[str(LYING_SERVER)])
