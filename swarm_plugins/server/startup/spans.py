"""Loads a server's spans as its settings say, and measures them."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from swarm_plugins.blocks.kv import KVPool
from swarm_plugins.blocks.load import ExpertsElsewhere, load_span
from swarm_plugins.blocks.span import Span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import MissingExpertsError
from swarm_plugins.server.background import in_thread, return_free_memory
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.hosted import storages
from swarm_plugins.server.startup.capacity import Speed, measure
from swarm_plugins.server.startup.kernels import kernel_of
from swarm_plugins.server.startup.network_rate import Surroundings, network_rate
from swarm_plugins.server.startup.placing import Rates
from swarm_plugins.transport.server_info import ServerInfo

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class SpanLoader:
    """Loads and measures spans of one checkpoint."""

    checkpoint: Checkpoint
    config: ServeConfig
    device: torch.device
    elsewhere: ExpertsElsewhere | None = None
    """Makes the experts of a block run at other peers. None: all are here."""
    rehearsing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Replaces experts elsewhere by zeros inside the context, where there may be no holders yet."""
    pool: KVPool | None = None
    """The KV budget of all spans. None: the next span makes it."""
    _kernel: tuple[str | None] | None = None
    """What the first span has found; a server keeps to it, so that its numbers stay the same."""

    def load(self, blocks: range) -> Span:
        """Loads a span; takes seconds to minutes.

        Raises:
            SwarmError: If the checkpoint or a setting is at fault.
        """
        config = self.config
        if self._kernel is None:
            self._kernel = (kernel_of(self.checkpoint, blocks, config, self.device),)
        # The span is tried once when it has been loaded; holders may come later.
        with self.rehearsing():
            span = load_span(
                self.checkpoint,
                blocks,
                dtype=None if config.dtype is None else getattr(torch, config.dtype),
                device=self.device,
                quantization=config.quantization,
                kernel=self._kernel[0],
                kv_bytes=config.kv_bytes,
                kv_bits=config.kv_bits,
                pool=self.pool,
                offload=config.offload if self.elsewhere is None else None,
                elsewhere=self.elsewhere,
                progress=sys.stderr.isatty(),
            )
        # Loading leaves cycles that hold the weights as they were read.
        gc.collect()
        return_free_memory()
        return span

    async def measured(self, span: Span) -> Speed:
        """Measures a span; without its remote experts if these have no holders yet."""
        tokens = self.config.max_batch_tokens
        try:
            return await in_thread(lambda: measure(span, max_tokens=tokens, weights=storages(span)))
        except MissingExpertsError as error:
            log.warning("%s", error)
            with self.rehearsing():
                return await in_thread(lambda: measure(span, max_tokens=tokens, weights=storages(span)))

    async def rates(self, blocks: range, network: Surroundings, info: ServerInfo) -> Rates:
        """Measures blocks, and the network to other servers; not if they need experts that others hold."""
        if self.config.remote_experts:
            return Rates(0.0, 0.0)
        span = await in_thread(lambda: self.load(blocks))
        try:
            speed = await self.measured(span)
            return Rates(round(speed.throughput, 3), await rate_of_network(span, network, info))
        finally:
            span.close()


async def rate_of_network(span: Span, network: Surroundings, info: ServerInfo) -> float:
    """Returns how many hidden states of a span a second the network carries to other servers."""
    token_bytes = span.spec.hidden_size * span.spec.dtype.itemsize
    return await network_rate(network, info.version, info.num_blocks, token_bytes)
