"""Experts that a server holds: loading as the settings say, and how fast they are."""

from __future__ import annotations

import logging

import torch

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.offload.held import HOLDER_BITS, HeldExperts, load_held_experts
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.startup.capacity import Speed, median_s

log = logging.getLogger(__name__)

_MEASURED_ROWS = 64


def load_held(checkpoint: Checkpoint, blocks: range, config: ServeConfig) -> HeldExperts | None:
    """Loads the experts that the settings name, if any; see `load_held_experts`."""
    if config.experts is None:
        return None
    held = load_held_experts(
        checkpoint,
        blocks,
        config.experts,
        part=config.slice,
        dtype=None if config.dtype is None else getattr(torch, config.dtype),
        device=torch.device(config.device),
        bits=HOLDER_BITS[config.quantization],
        offload=config.offload,
    )
    if held.widening is not None:
        log.info("experts: %s", held.widening)
    return held


def measure_held(held: HeldExperts) -> Speed:
    """Measures the rows per second, and the seconds of a single row, through one expert."""
    block, expert = held.blocks[0], held.experts.start
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_MEASURED_ROWS, held.hidden_size, generator=generator).to(held.device, held.dtype)
    times = [
        median_s(lambda count=count: held.run(block, rows[:count], {expert: slice(0, count)}), held.device)  # type: ignore[misc]
        for count in (_MEASURED_ROWS, 1)
    ]
    return Speed(throughput=_MEASURED_ROWS / times[0], decode_s=times[1])
