"""Which format a width is, and which kernel computes with a format on a device."""

from __future__ import annotations

import torch

from swarm_plugins.weights.formats.groups import GroupedFormat
from swarm_plugins.weights.formats.int8 import Int8Format
from swarm_plugins.weights.formats.nf4 import Nf4Format
from swarm_plugins.weights.kernel import Kernel
from swarm_plugins.weights.kernels.int4pack import Int4PackKernel
from swarm_plugins.weights.kernels.int8 import Int8Kernel
from swarm_plugins.weights.kernels.nf4 import Nf4Kernel
from swarm_plugins.weights.kernels.widening import WideningKernel
from swarm_plugins.weights.stored import QuantizingFormat, StoredFormat
from swarm_plugins.weights.widths import NF4, Width


def half_type(dtype: torch.dtype) -> torch.dtype:
    """Returns the 16-bit type that replaces a floating type."""
    return torch.bfloat16 if dtype.itemsize > 2 else dtype


def width_on(width: Width, device: torch.device) -> Width:
    """Returns the width of weights that are quantized on their way to a device.

    There are two kinds of 4 bits: this package's own, which torch multiplies with fast on a CPU, and nf4, which
    bitsandbytes multiplies with fast on a CUDA device.
    """
    return NF4 if width == 4 and device.type == "cuda" else width


def format_of(shape: tuple[int, int], bits: Width) -> QuantizingFormat:
    """Returns the format of a weight ``[out, in]`` in 8, 4, 3, 2 bits or ``nf4``."""
    if bits == 8:
        return Int8Format(shape)
    if bits == NF4:
        return Nf4Format(shape)
    return GroupedFormat(shape, bits)


def kernel_for(stored: StoredFormat, device: torch.device) -> Kernel:
    """Returns what multiplies with weights of a format on a device."""
    if isinstance(stored, Int8Format):
        return Int8Kernel(stored)
    if isinstance(stored, Nf4Format):
        return Nf4Kernel(stored)
    if isinstance(stored, GroupedFormat) and device.type == "cpu":
        return Int4PackKernel(stored)
    return WideningKernel(stored)
