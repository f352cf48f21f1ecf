"""A local swarm of processes whose connections and answers can be made to fail."""

from __future__ import annotations

from swarm_plugins.links.line import Line
from swarm_plugins.links.network import Network, Ports, Traffic
from swarm_plugins.local_swarm import LocalSwarm
from swarm_plugins.transport.loop import LoopThread


class FaultySwarm(LocalSwarm):
    """A [`LocalSwarm`][swarm_plugins.LocalSwarm] whose lines run in this process, to be cut and slowed at any time.

    Its arguments are those of `LocalSwarm`.
    """

    network: Network
    """The lines, while the swarm runs."""
    _loop: LoopThread | None = None
    _num_replaced = 0

    def lines_to(self, index: int) -> list[Line]:
        """Returns the lines by which others call a server; what a `Line` names an answer comes from the server."""
        callers = (lines[index] for at, lines in enumerate(self.network.for_servers) if at != index)
        return [self.network.for_clients[index], *callers]

    def lines_from(self, index: int) -> list[Line]:
        """Returns the lines by which a server calls others; what a `Line` names an answer goes to the server."""
        return [line for at, line in enumerate(self.network.for_servers[index]) if at != index]

    def traffic(self) -> Traffic:
        """Returns the bytes carried so far by the links."""
        return self.network.traffic()

    def replace_by_liar(self, index: int) -> None:
        """Ends a server at once and starts, behind its lines, one with a new identity, whose outputs are wrong by 1 %.

        `restart` brings the honest one back. Clients notice only if they check answers (``SwarmConfig(verify="on")``):
        those of a swarm on their own machine do not by default.
        """
        self._num_replaced += 1
        identity = self.folder / f"liar-{self._num_replaced}.key"
        self._replace(index, {"identity": identity}, module="swarm_plugins.testing.lying_server")

    def _open_links(self) -> Ports:
        self.network = Network(self.num_servers, *self._links)
        loop = self._loop = LoopThread("swarm-links")
        loop.start()
        loop.run(self.network.start())
        return self.network.ports()

    def _admit(self, index: int) -> None:
        self.network.admit(index)

    def _shut_links(self) -> None:
        self.network.shut()

    def _close_links(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.run(self.network.close())
            loop.close()
