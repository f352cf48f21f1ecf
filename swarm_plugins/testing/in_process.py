"""A whole swarm in this process, for tests: real spans, handlers and wire format, without libp2p.

`swarm_plugins.LocalSwarm` starts real servers instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from swarm_plugins.blocks.kv import KVPool
from swarm_plugins.blocks.load import load_span
from swarm_plugins.blocks.span import Span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.client import SwarmConfig, SwarmConnection
from swarm_plugins.links import Link
from swarm_plugins.routing.placement import Move
from swarm_plugins.server.assembly import assembled
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.distances import round_trips
from swarm_plugins.server.hosted import HostedSpans
from swarm_plugins.server.moving import Mover
from swarm_plugins.server.rpc.table import service_handlers
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.pushes import Pushes
from swarm_plugins.testing.compute import SimulatedCompute
from swarm_plugins.testing.liars import Liar
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.channel import Channel, Handler
from swarm_plugins.transport.identity import Identity, new_identity
from swarm_plugins.transport.server_info import ServerInfo

_STORE_BYTES = 1 << 28
_ANNOUNCED_TOKENS = 512
"""Of the batch whose speed a server announces."""
_LEAST_S = 1e-6


class InProcessSwarm:
    """Serves spans of a model inside this process; ``connection`` reaches them.

    Args:
        directory: The model.
        spans: ``(start, end)`` of each server. None: two servers, half of the blocks each.
        dtype: Compute dtype of the servers. None: the checkpoint's.
        config: How the client behaves.
        liars: Servers that lie, by index.
        compute: What the blocks of each server take. None: what they take here.
        link: Between the client and each server that is started with the swarm, and between these. None: no distance.
        drain_s: How long a server that moves waits for open sessions.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        spans: Sequence[tuple[int, int]] | None = None,
        dtype: torch.dtype | None = None,
        config: SwarmConfig | None = None,
        liars: Mapping[int, Liar] | None = None,
        compute: Sequence[SimulatedCompute] | None = None,
        link: Link | None = None,
        drain_s: float = 0.0,
    ) -> None:
        self.directory = directory
        self.spans = spans
        self.dtype = dtype
        # By default the same bits each time, whatever servers took before.
        self.config = config or SwarmConfig(micro_batches=1)
        self.liars = dict(liars or {})
        self.compute = compute
        self.link = link
        self.drain_s = drain_s
        self.peers: list[str] = []
        """Ids of the servers: ``peer0`` and so on; those of keys, if answers are verified."""
        self.services: dict[str, Service] = {}
        self._movers: dict[str, Mover] = {}
        self._handlers: dict[str, dict[str, Handler]] = {}
        self._num_started = 0
        self.transport = LocalTransport(self._handlers)
        self.connection = SwarmConnection(self._open_network, self.config)

    async def _open_network(self) -> LocalTransport:
        return self.transport

    def start(self) -> InProcessSwarm:
        """Loads the spans and starts the compute threads and the connection."""
        checkpoint = Checkpoint.open(self.directory)
        num_blocks = int(checkpoint.config.get_text_config(decoder=True).num_hidden_layers)
        spans = self.spans or [(0, num_blocks // 2), (num_blocks // 2, num_blocks)]
        for index, (start, end) in enumerate(spans):
            peer = self._add(index, range(start, end), self.liars.get(index))
            self.transport.line(peer).link = self.link or Link()
            for other in self.peers[:index]:
                self.transport.line(peer, other).link = self.transport.line(other, peer).link = self.link or Link()
        self.connection.start()
        return self

    def _add(self, index: int, blocks: range, liar: Liar | None) -> str:
        """Starts a server that was never seen before."""
        identity = new_identity() if self.config.verify == "on" else None
        peer = f"peer{self._num_started}" if identity is None else identity.peer_id
        self._num_started += 1
        self.peers[index : index + 1] = [peer]
        self._serve(peer, self.directory, blocks, identity, liar)
        return peer

    def _serve(
        self, peer: str, directory: str | Path, blocks: range, identity: Identity | None, liar: Liar | None
    ) -> None:
        checkpoint = Checkpoint.open(directory)
        span = self._load(peer, checkpoint, blocks)
        if liar is not None:
            liar.corrupt(span)
        # Liars are preferred, however late their answers are on a busy machine: a lie never asked for shows nothing.
        honest_speed = 0.01 if self.liars else 1.0
        speed = honest_speed if liar is None else 2.0
        compute = self.compute[self.peers.index(peer)] if self.compute else SimulatedCompute(token_s=1.0 / speed)
        service = self._service(peer, checkpoint, span, compute)
        service.identity = identity
        self.services[peer] = service
        self._handlers[peer] = service_handlers(service)

    def _load(self, peer: str, checkpoint: Checkpoint, blocks: range, pool: KVPool | None = None) -> Span:
        span = load_span(checkpoint, blocks, dtype=self.dtype, pool=pool)
        return span if self.compute is None else self.compute[self.peers.index(peer)].slow_down(span)

    def restart(self, peer: str, *, directory: str | Path | None = None) -> None:
        """Starts a killed server again, under its identity, without its sessions, graphs and adapters.

        Args:
            peer: The server.
            directory: Another model to serve. None: this swarm's.
        """
        old = self.services[peer]
        old.scheduler.close()
        info = old.info()
        self._serve(peer, directory or self.directory, range(info.start, info.end), old.identity, None)
        self.transport.revive(peer)

    def replace(self, peer: str, liar: Liar | None = None) -> str:
        """Kills a server and starts one with the same blocks and a new identity; returns its id."""
        self.kill(peer)
        old = self.services.pop(peer)
        del self._handlers[peer], self._movers[peer]
        old.scheduler.close()
        info = old.info()
        return self._add(self.peers.index(peer), range(info.start, info.end), liar)

    def _service(self, peer: str, checkpoint: Checkpoint, span: Span, compute: SimulatedCompute) -> Service:
        spans = HostedSpans(span)
        service = assembled(checkpoint, spans)
        service.pushes = Pushes(self.transport.seen_from(peer))
        service.describe(
            throughput=_ANNOUNCED_TOKENS / max(compute.seconds(_ANNOUNCED_TOKENS), _LEAST_S),
            decode_s=compute.seconds(1),
            free_kv_tokens=1 << 20,
            mobility="loads-first",
            pushes=True,
        )
        self._movers[peer] = Mover(
            config=ServeConfig(model=str(self.directory), announce_every_s=0.05, drain_s=self.drain_s),
            presence=_Place(peer, lambda: self.transport),
            service=service,
            spans=spans,
            load=lambda blocks: self._load(peer, checkpoint, blocks, spans.pool),
        )
        return service

    @property
    def num_sessions(self) -> int:
        """Sessions open on all servers."""
        return sum(len(service.sessions) for service in self.services.values())

    def move(self, peer: str, start: int, end: int) -> None:
        """Moves a server to other blocks, if all that it leaves have another server."""
        self.connection.loop.run(self._movers[peer].make(Move(peer, range(start, end), closes_gap=False)))

    def measure_round_trips(self) -> None:
        """Lets all servers measure how far they are from their neighbors, and announce it; clients ask for that."""
        for peer, service in self.services.items():
            place = _Place(peer, lambda: self.transport)
            found = self.connection.loop.run(round_trips(place, service.info()))
            service.describe(round_trips=found)

    def kill(self, peer: str) -> None:
        """Makes a server vanish, as in a crash."""
        self.connection.loop.run(self.transport.kill(peer))

    def close(self) -> None:
        """Closes the connection and stops the compute threads. Idempotent."""
        self.connection.close()
        for service in self.services.values():
            service.scheduler.close()
        self.services = {}

    def __enter__(self) -> InProcessSwarm:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Place:
    """A server's place in a swarm whose directory asks the servers themselves."""

    def __init__(self, peer: str, transport: Callable[[], LocalTransport]) -> None:
        self.peer_id = peer
        self._transport = transport

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        return await self._transport().servers(version, num_blocks)

    async def announce(self, info: Callable[[], ServerInfo]) -> None:
        info()

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        return await self._transport().seen_from(self.peer_id).open(peer, rpc, timeout_s=timeout_s)
