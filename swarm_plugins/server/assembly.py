"""A server without a network: a service of blocks that others reach within this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm_plugins.blocks.load import load_span
from swarm_plugins.blocks.span import Span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.partition import num_blocks_of
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.server.compute.scheduler import Scheduler
from swarm_plugins.server.hosted import HostedSpans
from swarm_plugins.server.rpc.table import service_handlers
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.prefixes import PrefixStore
from swarm_plugins.transport.channel import Handler
from swarm_plugins.transport.messages import CODECS
from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.weights.published.weights import Published


def assembled(checkpoint: Checkpoint, spans: HostedSpans) -> Service:
    """Returns a service of blocks, with a compute thread that runs."""
    published = Published.of(checkpoint)
    scheduler = Scheduler(spans)
    scheduler.start()
    announced = ServerInfo(
        version=checkpoint.version.key,
        model=checkpoint.version.name,
        num_blocks=num_blocks_of(checkpoint.config),
        start=spans.spec.blocks.start,
        end=spans.spec.blocks.stop,
        dtype=str(spans.spec.dtype).removeprefix("torch."),
        quantization="none" if published is None else published.name,
        has_states=spans.spec.has_states,
        codecs=CODECS,
    )
    return Service(announced=announced, runner=spans, scheduler=scheduler, prefixes=PrefixStore(spans.pool))


@dataclass(frozen=True)
class HostedBlocks:
    """Blocks that a client runs in its own process when no server of the swarm holds them."""

    handlers: Mapping[str, Handler]
    """By rpc name."""
    service: Service
    span: Span

    @property
    def is_idle(self) -> bool:
        """Whether no session is open and no request runs."""
        return not len(self.service.sessions) and not self.service.scheduler.num_waiting

    def close(self) -> None:
        """Ends the compute thread and frees the blocks."""
        self.service.scheduler.close()
        self.service.activations.clear()
        self.span.close()


def host_blocks(checkpoint: Checkpoint, blocks: range) -> HostedBlocks:
    """Loads blocks and makes them ready to serve; their experts, if any, stay on disk and are read as needed.

    Raises:
        CheckpointError: If they cannot be read.
    """
    try:
        span = load_span(checkpoint, blocks, offload=OffloadConfig())
    except UnsupportedError:  # no experts
        span = load_span(checkpoint, blocks)
    service = assembled(checkpoint, HostedSpans(span))
    return HostedBlocks(service_handlers(service), service, span)
