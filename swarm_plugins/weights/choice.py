"""Which format a width is, and which kernels can compute with a format on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from swarm_plugins.errors import ConfigError
from swarm_plugins.weights.formats.groups import GroupedFormat
from swarm_plugins.weights.formats.int8 import Int8Format
from swarm_plugins.weights.formats.nested import NestedFormat
from swarm_plugins.weights.formats.nf4 import Nf4Format
from swarm_plugins.weights.formats.nibbles import NibblesFormat
from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.kernel import Kernel
from swarm_plugins.weights.kernels.fp16 import Fp16Kernel, has_fbgemm
from swarm_plugins.weights.kernels.int4pack import Int4PackKernel, takes_groups
from swarm_plugins.weights.kernels.int8 import HAS_DOT_PRODUCTS, Int8Kernel
from swarm_plugins.weights.kernels.int8_fbgemm import Int8FbgemmKernel
from swarm_plugins.weights.kernels.nf4 import Nf4Kernel
from swarm_plugins.weights.kernels.nibbles import NibblesKernel
from swarm_plugins.weights.kernels.onednn import OneDnnKernel, has_onednn
from swarm_plugins.weights.kernels.plain import FewRowsKernel, PlainKernel, has_own_bfloat16
from swarm_plugins.weights.kernels.widening import WideningKernel
from swarm_plugins.weights.names import FBGEMM, FP16, GEMV, HALVES, INT_MM, ONEDNN, PLAIN
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
    """Returns the format of a weight ``[out, in]`` in fewer than 16 bits."""
    if bits == 8:
        return Int8Format(shape)
    if bits == NF4:
        return Nf4Format(shape)
    return GroupedFormat(shape, bits) if isinstance(bits, int) else NestedFormat.of(shape, bits)


def candidates(stored: StoredFormat) -> Mapping[str, Callable[[], Kernel]]:
    """Returns the kernels between which a CPU has a choice, by name, the one to use without a choice first.

    All keep the promise of the format's type. Kernels that this processor or build of torch lacks are left out.
    """
    found: dict[str, Callable[[], Kernel]] = {}
    if isinstance(stored, PlainFormat):
        found[PLAIN] = lambda: PlainKernel(stored)
        if stored.dtype == torch.float32:
            found[HALVES] = lambda: FewRowsKernel(stored)
        if stored.dtype == torch.bfloat16 and has_own_bfloat16():
            found[GEMV] = lambda: FewRowsKernel(stored)
        if stored.dtype != torch.float32 and has_fbgemm():
            found[FP16] = lambda: Fp16Kernel(stored)
        if has_onednn(stored.dtype):
            found[ONEDNN] = lambda: OneDnnKernel(stored)
    elif isinstance(stored, Int8Format):
        found[INT_MM] = lambda: Int8Kernel(stored)
        # Without integer dot products FBGEMM adds pairs in 16 bits, which overflow.
        if has_fbgemm() and HAS_DOT_PRODUCTS:
            found[FBGEMM] = lambda: Int8FbgemmKernel(stored)
    return found


def kernel_for(stored: StoredFormat, device: torch.device, name: str | None = None) -> Kernel:
    """Returns what multiplies with weights of a format on a device.

    Args:
        stored: The format.
        device: Where the weight is.
        name: One of its `candidates` on a CPU. None: the first of them, or the only kernel there is.

    Raises:
        ConfigError: If the named kernel does not compute with the format here.
    """
    if name is not None and device.type == "cpu":
        known = candidates(stored)
        if name not in known:
            raise ConfigError(
                f"kernel {name!r} does not multiply with {stored} on this machine; it has "
                f"{', '.join(known) or 'no choice of kernels for this format'}"
            )
        return known[name]()
    if isinstance(stored, PlainFormat):
        return PlainKernel(stored)
    if isinstance(stored, Int8Format):
        return Int8Kernel(stored)
    if isinstance(stored, Nf4Format):
        return Nf4Kernel(stored)
    if isinstance(stored, GroupedFormat) and device.type == "cpu" and takes_groups(stored):
        return Int4PackKernel(stored)
    if isinstance(stored, NibblesFormat) and device.type == "cpu":
        return NibblesKernel(stored)
    return WideningKernel(stored)
