"""A whole swarm in this process, for tests: real spans, handlers and wire format, without libp2p.

`swarm_plugins.LocalSwarm` starts real servers instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from swarm_plugins.blocks.load import load_span
from swarm_plugins.blocks.span import Span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.partition import num_blocks_of
from swarm_plugins.client import SwarmConfig, SwarmConnection
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.server.assembly import assembled
from swarm_plugins.server.hosted import HostedSpans
from swarm_plugins.server.rpc.table import service_handlers
from swarm_plugins.server.service import Service
from swarm_plugins.server.startup.capacity import Speed
from swarm_plugins.server.state.pushes import Pushes
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.channel import Handler
from swarm_plugins.transport.identity import Identity, new_identity
from swarm_plugins.weights.names import announced


class InProcessSwarm:
    """Serves spans of a model inside this process; ``connection`` reaches them.

    Args:
        directory: The model.
        spans: ``(start, end)`` of each server. None: two servers, half of the blocks each.
        dtype: Compute dtype of the servers. None: the checkpoint's.
        device: Where the servers compute.
        quantization: How they keep weights, as for `swarm serve`.
        kv_bits: How sessions keep keys and values, likewise.
        config: How the client behaves.
        offload: Budgets of experts that each server leaves on disk. None: they are loaded.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        spans: Sequence[tuple[int, int]] | None = None,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        quantization: str = "none",
        kv_bits: int | None = None,
        config: SwarmConfig | None = None,
        offload: OffloadConfig | None = None,
    ) -> None:
        self.directory = directory
        self.spans = spans
        self.dtype = dtype
        self.device = device
        self.quantization = quantization
        self.kv_bits = kv_bits
        self.offload = offload
        # By default the same bits each time, whatever servers took before.
        self.config = config or SwarmConfig(micro_batches=1)
        self.peers: list[str] = []
        """Ids of the servers: ``peer0`` and so on; those of keys, if answers are verified."""
        self.services: dict[str, Service] = {}
        self._handlers: dict[str, dict[str, Handler]] = {}
        self._num_started = 0
        self.transport = self.new_transport(self._handlers)
        self.connection = SwarmConnection(self._open_network, self.config)

    def new_transport(self, handlers: dict[str, dict[str, Handler]]) -> LocalTransport:
        """Returns what carries the messages; for subclasses."""
        return LocalTransport(handlers)

    def prepare(self, peer: str, span: Span) -> Span:
        """Returns the span that a server runs, given the one it has loaded; for subclasses."""
        return span

    def speed(self, peer: str) -> Speed:
        """Returns the speed that a server announces; for subclasses."""
        return Speed(throughput=1.0, decode_s=1.0)

    async def _open_network(self) -> LocalTransport:
        return self.transport

    def start(self) -> InProcessSwarm:
        """Loads the spans and starts the compute threads and the connection."""
        checkpoint = Checkpoint.open(self.directory)
        num_blocks = num_blocks_of(checkpoint.config)
        spans = self.spans or [(0, num_blocks // 2), (num_blocks // 2, num_blocks)]
        for index, (start, end) in enumerate(spans):
            self.add(index, range(start, end))
        self.connection.start()
        return self

    def add(self, index: int, blocks: range) -> str:
        """Starts a server that was never seen before, in the place of another if there is one; returns its id."""
        identity = new_identity() if self.config.verify == "on" else None
        peer = f"peer{self._num_started}" if identity is None else identity.peer_id
        self._num_started += 1
        self.peers[index : index + 1] = [peer]
        self._serve(peer, self.directory, blocks, identity)
        return peer

    def _serve(self, peer: str, directory: str | Path, blocks: range, identity: Identity | None) -> None:
        checkpoint = Checkpoint.open(directory)
        span = load_span(
            checkpoint,
            blocks,
            dtype=self.dtype,
            device=self.device,
            quantization=self.quantization,
            kv_bits=self.kv_bits,
            offload=self.offload,
        )
        span = self.prepare(peer, span)
        service = self._service(peer, checkpoint, HostedSpans(span))
        service.identity = identity
        self.services[peer] = service
        self._handlers[peer] = service_handlers(service)

    def _service(self, peer: str, checkpoint: Checkpoint, spans: HostedSpans) -> Service:
        service = assembled(checkpoint, spans)
        service.pushes = Pushes(self.transport.seen_from(peer))
        speed = self.speed(peer)
        service.describe(
            throughput=speed.throughput,
            decode_s=speed.decode_s,
            free_kv_tokens=1 << 20,
            mobility="loads-first",
            pushes=True,
        )
        if self.quantization != "none" or self.kv_bits is not None:
            service.describe(quantization=announced(self.quantization, self.kv_bits))
        return service

    @property
    def num_sessions(self) -> int:
        """Sessions open on all servers."""
        return sum(len(service.sessions) for service in self.services.values())

    def kill(self, peer: str) -> None:
        """Makes a server vanish, as in a crash."""
        self.connection.loop.run(self.transport.kill(peer))

    def restart(self, peer: str, *, directory: str | Path | None = None) -> None:
        """Starts a killed server again, under its identity, without its sessions, graphs and adapters.

        Args:
            peer: The server.
            directory: Another model to serve. None: this swarm's.
        """
        old = self.services[peer]
        old.scheduler.close()
        info = old.info()
        self._serve(peer, directory or self.directory, range(info.start, info.end), old.identity)
        self.transport.revive(peer)

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
