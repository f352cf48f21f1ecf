"""Products with 8-bit codes that have one scale per row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.weights.bnb import bitsandbytes
from swarm_plugins.weights.formats.int8 import Int8Format
from swarm_plugins.weights.kernel import Kernel

_LEVELS = 127
# The second half of an activation is its rounding error in steps this fine.
_FINE = 254
# Columns with an activation this large are multiplied in the wide type: LLM.int8(), section 3.2.
_OUTLIER_THRESHOLD = 6.0
# The first generation (Turing) whose integer units the 8-bit product is written for.
_LEAST_CAPABILITY = (7, 5)
# Without integer dot products the product is either slow or adds pairs in 16 bits, which overflow.
HAS_DOT_PRODUCTS: bool = getattr(torch.cpu, "_is_vnni_supported", lambda: False)()


@dataclass(frozen=True)
class Int8Kernel(Kernel):
    """Integer products.

    On a CPU with integer dot products each activation is split into two int8 numbers, 16 bits in all: the products are
    sums of integers, hence exact, and a row's result does not depend on the other rows. This takes half the time of
    float32. (Activations of 8 bits would take a third, but outliers would lose digits.) On CUDA it is the product of
    LLM.int8(): activations of 8 bits, columns with outliers apart.
    """

    format: Int8Format

    def product(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        codes, scales = parts["codes"], parts["scales"]
        if has_int8_product(rows.device):
            return int8_product(codes, scales, rows)
        if rows.is_cuda:
            return functional.linear(rows, self.widen(parts, rows.dtype))
        wide = rows.float()
        product = _split_product(wide, codes) if HAS_DOT_PRODUCTS else functional.linear(wide, codes.float())
        return product.mul_(scales).to(rows.dtype)


def _split_product(rows: Tensor, codes: Tensor) -> Tensor:
    count = rows.shape[0]
    if count == 0:
        return rows.new_zeros(0, codes.shape[0])
    scales = rows.abs().amax(dim=1, keepdim=True) / _LEVELS  # [T, 1]
    steps = rows / torch.where(scales == 0, 1.0, scales)
    coarse = steps.round()
    fine = ((steps - coarse) * _FINE).round_()
    halves = torch.cat([coarse, fine]).to(torch.int8)  # [2 T, in]
    transposed = codes.t()
    if count == 1:
        # Two products of one row are faster than one of two.
        sums = [torch._int_mm(half, transposed).float() for half in halves.split(1)]
    else:
        sums = list(torch._int_mm(halves, transposed).float().split(count))
    return sums[0].add_(sums[1], alpha=1 / _FINE).mul_(scales)


def has_int8_product(device: torch.device) -> bool:
    """Returns whether a device computes bitsandbytes' 8-bit product."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def int8_product(codes: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    """Multiplies rows by an 8-bit weight as LLM.int8() does (Dettmers et al. 2022, section 3), without gradients.

    Activations are rounded to 8 bits with one scale per row; columns with an outlier in any row are multiplied in the
    type of the rows instead.

    Args:
        codes: ``[out, in]`` of int8.
        scales: ``[out]`` of float32; a weight is its code times this.
        rows: ``[T, in]``, any floating type.

    Returns:
        ``[T, out]`` in the type of the rows.
    """
    if rows.shape[0] == 0:
        return rows.new_zeros(0, codes.shape[0])
    # The two steps of its `matmul`, which logs a cast for every product in another type than float16.
    steps, row_scales, outliers = bitsandbytes().functional.int8_vectorwise_quant(
        rows.to(torch.float16, memory_format=torch.contiguous_format), threshold=_OUTLIER_THRESHOLD
    )
    largest = scales * 127.0
    product: Tensor
    product, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(rows, steps, codes, row_scales, largest, outliers)
    return product
