"""As what a server's blocks are announced: whose weights they are, and how precisely it keeps them."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.offload.formats.experts import width_on
from swarm_plugins.offload.store.quantized_store import open_quantized
from swarm_plugins.offload.widths import Width
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.versions import ModelVersion

__all__ = ["Identity", "identity_of"]

log = logging.getLogger(__name__)


class Identity(NamedTuple):
    """What clients look for, and what they are told."""

    version: ModelVersion
    """Of the weights as they were published."""
    quantization: str
    """How they are kept: ``none``, ``int8``, ``nf4``, or the widths of experts and others."""


def identity_of(checkpoint: Checkpoint, config: ServeConfig) -> Identity:
    """Returns the identity of the blocks of a checkpoint.

    Those of a quantized store are blocks of the model that it was made from, kept in few bits, as those are that are
    quantized while they are loaded: clients ask for that model, and are told of the bits.

    Args:
        checkpoint: What is served.
        config: The server's settings.

    Raises:
        CheckpointError: If a file cannot be read, or a store is damaged.
    """
    store = open_quantized(checkpoint)
    if store is None:
        return Identity(checkpoint.version, _quantization(config))
    base = store.manifest.base_version
    log.info("blocks of %s are announced as blocks of %s", checkpoint.name, base)
    if checkpoint.directory is None:
        # Nobody can tell from few bits whose weights they were.
        log.warning(
            "%s says that it was made from %s: its blocks are announced as blocks of that model, so serve it only if "
            "you trust who published it, or make a store yourself with swarm quantize",
            checkpoint.version,
            base,
        )
    return Identity(base, _widths(store.manifest.expert_bits, store.manifest.other_bits))


def _quantization(config: ServeConfig) -> str:
    """Returns how weights are kept that are quantized while they are loaded, if they are."""
    bits = None if config.offload is None else config.offload.expert_bits
    if bits is None or bits == 16:
        return config.quantization
    return _widths(width_on(bits, torch.device(config.device)), 16)


def _widths(expert_bits: Width, other_bits: Width) -> str:
    kept = {"experts": expert_bits, "others": other_bits}
    # Of the others 16 bits are what nobody would ask about; experts are named, so that a store is told from the model.
    return "+".join(
        f"{part}-{bits if isinstance(bits, str) else f'int{bits}' if bits != 16 else '16bit'}"
        for part, bits in kept.items()
        if part == "experts" or bits != 16
    )
