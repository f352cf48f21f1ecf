"""Which format the experts of a checkpoint get."""

from __future__ import annotations

import torch

from swarm_plugins.offload.formats.experts import QuantizingFormat
from swarm_plugins.offload.formats.plain import PlainFormat
from swarm_plugins.offload.interfaces import BufferLayout, ExpertFormat
from swarm_plugins.offload.widths import NF4, Width

__all__ = ["expert_format", "half_type", "width_on"]


def expert_format(
    stored: BufferLayout, bits: Width | None, dtype: torch.dtype, device: torch.device, *, is_transposed: bool
) -> ExpertFormat:
    """Returns how to multiply with experts that a checkpoint has in a floating type.

    Args:
        stored: How an expert lies in its buffer after reading.
        bits: Width in memory: 16, 8, 4, 3, 2 or ``nf4``; None: that of ``dtype``.
        dtype: Type to compute in.
        device: Where.
        is_transposed: Whether weights lie as ``[in, out]``.
    """
    if bits is None:
        return PlainFormat(stored, dtype, is_transposed=is_transposed)
    if bits == 16:
        return PlainFormat(stored, half_type(dtype), is_transposed=is_transposed)
    return QuantizingFormat(stored, width_on(bits, device), device, is_transposed=is_transposed)


def half_type(dtype: torch.dtype) -> torch.dtype:
    """Returns the type of 16 bits that stands for a floating type."""
    return torch.bfloat16 if dtype.itemsize > 2 else dtype


def width_on(width: Width, device: torch.device) -> Width:
    """Returns the width that weights get which are quantized on their way to a device.

    There are two kinds of 4 bits: this package's own, which torch multiplies with fast on a CPU, and nf4, which
    bitsandbytes multiplies with fast on a CUDA device.
    """
    return NF4 if width == 4 and device.type == "cuda" else width
