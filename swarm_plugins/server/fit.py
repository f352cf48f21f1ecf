"""How many blocks the memory of this machine holds."""

from __future__ import annotations

import math

import psutil
import torch

from swarm_plugins.checkpoint import Checkpoint, TensorInfo
from swarm_plugins.errors import ConfigError
from swarm_plugins.server.config import ServeConfig

__all__ = ["blocks_that_fit"]

_USABLE_SHARE = 0.9
_QUANTIZED_BYTES = {"int8": 1.0, "nf4": 0.57}
"""Bytes per weight, scales included."""
_EXPERTS = ".experts."
"""In the names of nearly all families, and of quantized stores with a dot before; where it is not, fewer blocks are
taken than would fit."""


def blocks_that_fit(checkpoint: Checkpoint, config: ServeConfig, *, available_bytes: int | None = None) -> int:
    """Returns how many blocks can be hosted beside the budgets for caches and graphs.

    The whole checkpoint over the number of blocks stands for one block: embeddings make that a little too large,
    which leaves a margin.

    Args:
        checkpoint: The model.
        config: Device, dtype, quantization and budgets.
        available_bytes: Free memory. None: what the device has free now.

    Raises:
        ConfigError: If not even one block fits.
    """
    num_blocks = int(checkpoint.config.get_text_config(decoder=True).num_hidden_layers)
    if available_bytes is None:
        available_bytes = _free_bytes(torch.device(config.device))
    room = available_bytes * _USABLE_SHARE - config.kv_bytes - config.activation_bytes
    if config.offload is not None:
        room -= config.offload.fast_bytes or 0
    block_bytes = sum(_hosted_bytes(info, config) for info in checkpoint.tensors.values()) / num_blocks
    fitting = int(room // max(block_bytes, 1.0)) if room > 0 else 0
    if fitting < 1:
        raise ConfigError(
            f"no block of {checkpoint.name} fits: one takes about {block_bytes / 1e6:.0f} MB, "
            f"{available_bytes / 1e6:.0f} MB are free and {(config.kv_bytes + config.activation_bytes) / 1e6:.0f} MB "
            "of these are set aside for caches and graphs; lower kv_bytes and activation_bytes, or quantize"
        )
    return min(fitting, num_blocks)


def _hosted_bytes(info: TensorInfo, config: ServeConfig) -> float:
    if config.offload is not None and _EXPERTS in f".{info.name}":
        return 0.0
    numel, dtype = math.prod(info.shape), info.dtype
    if len(info.shape) > 1 and config.quantization in _QUANTIZED_BYTES:
        return numel * _QUANTIZED_BYTES[config.quantization]
    if config.dtype is not None and dtype.is_floating_point:
        dtype = getattr(torch, config.dtype)
    return float(numel * dtype.itemsize)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
