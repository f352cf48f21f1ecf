"""A local swarm of processes whose connections and answers can be made to fail."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

from swarm_plugins.local_swarm import LocalServer, LocalSwarm
from swarm_plugins.testing.links import Link
from swarm_plugins.transport.loop import LoopThread


class FaultySwarm(LocalSwarm):
    """A [`LocalSwarm`][swarm_plugins.LocalSwarm] in which each server is reached through a link of its own.

    Its arguments are those of `LocalSwarm`. A server's link carries what others have to say to it, clients above all,
    and its answers; connections that it opens itself go through the links of the others.
    """

    links: tuple[Link, ...] = ()
    """Links in the order of the servers, while the swarm runs."""
    _loop: LoopThread | None = None
    _num_replaced = 0

    def start(self) -> FaultySwarm:
        """Opens the links, then starts the servers; see `LocalSwarm.start`."""
        loop = self._loop = LoopThread("swarm-links")
        loop.start()
        self.links = tuple(Link() for _ in range(self.num_servers))
        try:
            for link in self.links:
                loop.run(link.start())
            super().start()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Ends all servers and links. Idempotent."""
        super().close()
        loop, self._loop = self._loop, None
        if loop is not None:
            for link in self.links:
                loop.run(link.close())
            loop.close()

    def replace_by_liar(self, index: int) -> None:
        """Ends a server at once and starts, behind its link, one with a new identity, whose outputs are wrong by 1 %.

        `restart` brings the honest one back. Clients notice only if they check answers (``SwarmConfig(verify="on")``):
        those of a swarm on their own machine do not by default.
        """
        self._num_replaced += 1
        identity = self.folder / f"liar-{self._num_replaced}.key"
        self._replace(index, {"identity": identity}, module="swarm_plugins.testing.lying_server")

    def _spawn(
        self,
        index: int,
        options: Mapping[str, object],
        *,
        model: str | PathLike[str] | None = None,
        module: str = "swarm_plugins",
    ) -> LocalServer:
        link = self.links[index]
        addresses = {"host_maddrs": link.target_port, "announce_maddrs": link.port}
        ways = {option: f"/ip4/127.0.0.1/tcp/{port}" for option, port in addresses.items()}
        return super()._spawn(index, {**options, **ways}, model=model, module=module)
