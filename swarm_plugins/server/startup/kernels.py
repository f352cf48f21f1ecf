"""Which kernel a server forms its products with."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

import torch

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import ConfigError
from swarm_plugins.server.config import DTYPES, ServeConfig
from swarm_plugins.weights.choice import candidates
from swarm_plugins.weights.formats.int8 import Int8Format
from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.linears import MIN_FEATURES
from swarm_plugins.weights.published.weights import Published
from swarm_plugins.weights.stored import QuantizingFormat
from swarm_plugins.weights.trial import chosen

_BLOCK = re.compile(r"\.(\d+)\.")
_EXPERTS = ".experts."
_ROWS_OF_INT8 = ("bnb-int8", "int-quantized")
"""Published formats that servers of 16 bits multiply with as our int8 is."""


def kernel_of(checkpoint: Checkpoint, blocks: range, config: ServeConfig, device: torch.device) -> str | None:
    """Returns the kernel for a server's weights: the configured one, or the fastest here; None without a choice.

    Trying takes less than two seconds.

    Raises:
        ConfigError: If one is configured for another device than a CPU, or for another type of weights.
    """
    if device.type != "cpu":
        if config.kernel is not None:
            raise ConfigError(
                f"kernel is {config.kernel!r} and device {str(device)!r}: only CPUs have a choice, leave it out"
            )
        return None
    what = config.quantization if config.quantization != "none" else _dtype_name(checkpoint, config)
    published = Published.of(checkpoint)
    if published is not None and published.name in _ROWS_OF_INT8 and what != "float32":
        what = "int8"
    make = _format_maker(what)
    if config.kernel is not None:
        known = {} if make is None else candidates(make((MIN_FEATURES, MIN_FEATURES)))
        if config.kernel not in known:
            choice = f"expected {', '.join(known)}, or" if known else "they have no choice of kernels here,"
            raise ConfigError(f"kernel is {config.kernel!r} and the weights are {what}: {choice} leave it out")
        return config.kernel
    return None if make is None else chosen([make(shape) for shape in _shapes(checkpoint, blocks, config)], what)


def _format_maker(what: str) -> Callable[[tuple[int, int]], QuantizingFormat] | None:
    """Returns what makes the format of a weight from its shape; None for types with a single kernel."""
    if what == "int8":
        return Int8Format
    dtype = getattr(torch, what, None)
    return functools.partial(PlainFormat, dtype=dtype) if isinstance(dtype, torch.dtype) and what in DTYPES else None


def _shapes(checkpoint: Checkpoint, blocks: range, config: ServeConfig) -> Iterator[tuple[int, int]]:
    """Yields the shapes of the blocks' weights that are multiplied with from memory."""
    are_elsewhere = config.offload is not None or config.remote_experts
    for info in checkpoint.tensors.values():
        block = _BLOCK.search(info.name)
        if block is None or int(block[1]) not in blocks or (are_elsewhere and _EXPERTS in info.name):
            continue
        if len(info.shape) == 2 and min(info.shape) >= MIN_FEATURES:
            yield (info.shape[0], info.shape[1])


def _dtype_name(checkpoint: Checkpoint, config: ServeConfig) -> str:
    dtype = config.dtype or getattr(checkpoint.config.get_text_config(decoder=True), "dtype", None) or torch.float32
    return str(dtype).removeprefix("torch.")
