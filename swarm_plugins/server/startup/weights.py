"""How a server's blocks are announced: whose weights they are, and how precisely it keeps them."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.offload.store.quantized_store import open_quantized
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.versions import ModelVersion
from swarm_plugins.weights.choice import width_on
from swarm_plugins.weights.names import announced
from swarm_plugins.weights.published.weights import Published
from swarm_plugins.weights.widths import Width

log = logging.getLogger(__name__)


class HostedWeights(NamedTuple):
    """What clients look up, and what they learn."""

    version: ModelVersion
    """Of the weights as they were published."""
    quantization: str
    """How they are kept: ``none``, a width, the widths of experts and others, or how they were published; and keys and
    values of sessions, if these have few bits."""


def hosted_weights(checkpoint: Checkpoint, config: ServeConfig) -> HostedWeights:
    """Returns what is announced of the blocks of a checkpoint.

    Blocks of a quantized store are announced as blocks of the model it was made from, in few bits, just like blocks
    that are quantized while loading.

    Raises:
        CheckpointError: If a file cannot be read, or a store is damaged.
        UnsupportedError: If the checkpoint is published in few bits in a way that is not known.
    """
    store = open_quantized(checkpoint)
    if store is None:
        published = Published.of(checkpoint)
        kept = _quantization(config) if published is None else published.name
        return HostedWeights(checkpoint.version, announced(kept, config.kv_bits))
    base = store.manifest.base_version
    log.info("blocks of %s are announced as blocks of %s", checkpoint.name, base)
    if checkpoint.directory is None:
        # Few bits do not tell whose weights they were.
        log.warning(
            "%s claims to be made from %s: its blocks are announced as blocks of that model. Serve it only if you "
            "trust its publisher, or make a store yourself with swarm quantize",
            checkpoint.version,
            base,
        )
    kept = _widths(store.manifest.expert_bits, store.manifest.other_bits)
    return HostedWeights(base, announced(kept, config.kv_bits))


def _quantization(config: ServeConfig) -> str:
    """Returns how weights are kept that are quantized while loading."""
    bits = None if config.offload is None else config.offload.expert_bits
    if bits is None or bits == 16:
        return config.quantization
    return _widths(width_on(bits, torch.device(config.device)), 16)


def _widths(expert_bits: Width, other_bits: Width) -> str:
    kept = {"experts": expert_bits, "others": other_bits}
    # Others in 16 bits go without saying; experts are named, to tell a store from the model.
    return "+".join(
        f"{part}-{bits if isinstance(bits, str) else f'int{bits}' if bits != 16 else '16bit'}"
        for part, bits in kept.items()
        if part == "experts" or bits != 16
    )
