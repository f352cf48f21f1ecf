"""Which kernel a server forms its products with."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.weights.choice import candidates
from swarm_plugins.weights.formats.int8 import Int8Format
from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.linears import MIN_FEATURES
from swarm_plugins.weights.stored import QuantizingFormat
from swarm_plugins.weights.trial import chosen

_BLOCK = re.compile(r"\.(\d+)\.")
_EXPERTS = ".experts."


def kernel_of(checkpoint: Checkpoint, blocks: range, config: ServeConfig, device: torch.device) -> str | None:
    """Returns the kernel for a server's weights: the configured one, or the fastest here; None without a choice.

    Trying takes less than two seconds. Only CPUs have a choice.
    """
    if device.type != "cpu":
        return None
    formats = [_format(shape, checkpoint, config) for shape in _shapes(checkpoint, blocks, config)]
    known = [one for one in formats if one is not None]
    if not known:
        return None
    if config.kernel is not None:
        return config.kernel
    what = config.quantization if config.quantization != "none" else _dtype_name(checkpoint, config)
    return chosen(known, what)


def _shapes(checkpoint: Checkpoint, blocks: range, config: ServeConfig) -> Iterator[tuple[int, int]]:
    """Yields the shapes of the blocks' weights that are multiplied with from memory."""
    are_elsewhere = config.offload is not None or config.remote_experts
    for info in checkpoint.tensors.values():
        block = _BLOCK.search(info.name)
        if block is None or int(block[1]) not in blocks or (are_elsewhere and _EXPERTS in info.name):
            continue
        if len(info.shape) == 2 and min(info.shape) >= MIN_FEATURES:
            yield (info.shape[0], info.shape[1])


def _format(shape: tuple[int, int], checkpoint: Checkpoint, config: ServeConfig) -> QuantizingFormat | None:
    if config.quantization == "int8":
        return Int8Format(shape)
    if config.quantization != "none":
        return None
    dtype = getattr(torch, _dtype_name(checkpoint, config))
    return PlainFormat(shape, dtype) if candidates(PlainFormat(shape, dtype)) else None


def _dtype_name(checkpoint: Checkpoint, config: ServeConfig) -> str:
    dtype = config.dtype or getattr(checkpoint.config.get_text_config(decoder=True), "dtype", None) or torch.float32
    return str(dtype).removeprefix("torch.")
