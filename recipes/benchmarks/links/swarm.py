"""A swarm in this process at a distance, whose blocks may take a stated time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.benchmarks.compute import SimulatedCompute
from recipes.benchmarks.links.link import Link
from recipes.benchmarks.links.transport import LineTransport
from swarm_plugins.blocks.span import Span
from swarm_plugins.server.distances import round_trips
from swarm_plugins.server.startup.capacity import Speed
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.transport.channel import Channel, Handler
from swarm_plugins.transport.server_info import ServerInfo

_ANNOUNCED_TOKENS = 512
"""Of the batch whose speed a server announces."""


class DistantSwarm(InProcessSwarm):
    """An [`InProcessSwarm`][swarm_plugins.testing.InProcessSwarm] with lines between its peers.

    Args:
        directory: The model.
        link: Between the client and each server that is started with the swarm, and between these.
        compute: What the blocks of each server take. None: what they take here.
        **settings: Those of `InProcessSwarm`.
    """

    transport: LineTransport

    def __init__(
        self,
        directory: str | Path,
        *,
        link: Link | None = None,
        compute: Sequence[SimulatedCompute] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(directory, **settings)
        self.link = link or Link()
        self.compute = compute

    def new_transport(self, handlers: dict[str, dict[str, Handler]]) -> LineTransport:
        """Returns a transport with lines."""
        return LineTransport(handlers)

    def prepare(self, peer: str, span: Span) -> Span:
        """Makes a server's blocks wait."""
        return span if self.compute is None else self.compute[self.peers.index(peer)].slow_down(span)

    def speed(self, peer: str) -> Speed:
        """Returns the speed of its simulated compute."""
        if self.compute is None:
            return super().speed(peer)
        compute = self.compute[self.peers.index(peer)]
        return Speed(throughput=_ANNOUNCED_TOKENS / compute.seconds(_ANNOUNCED_TOKENS), decode_s=compute.seconds(1))

    def start(self) -> DistantSwarm:
        """Starts the servers, and puts them at a distance."""
        super().start()
        for index, peer in enumerate(self.peers):
            self.transport.line(peer).link = self.link
            for other in self.peers[:index]:
                self.transport.line(peer, other).link = self.transport.line(other, peer).link = self.link
        return self

    def measure_round_trips(self) -> None:
        """Lets all servers measure how far they are from their neighbors, and announce it; clients ask for that."""
        for peer, service in self.services.items():
            found = self.connection.loop.run(round_trips(Place(peer, self.transport), service.info()))
            service.describe(round_trips=found)

    def __enter__(self) -> DistantSwarm:
        return self.start()


class Place:
    """A server's place in a swarm whose directory asks the servers themselves."""

    def __init__(self, peer: str, transport: LineTransport) -> None:
        self.peer_id = peer
        self._transport = transport

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        """Asks the servers of a model; see `Directory`."""
        return await self._transport.servers(version, num_blocks)

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        """Opens a channel from this server to another one."""
        return await self._transport.seen_from(self.peer_id).open(peer, rpc, timeout_s=timeout_s)
