"""Weights in 8 bits: one scale for each row, as LLM.int8() has it (Dettmers et al. 2022, section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.offload.formats.bnb import has_int8_product, int8_product
from swarm_plugins.offload.formats.matrices import AsStored, Part

__all__ = ["Int8Matrix"]

_LEVELS = 127
# The second half of an activation is its rounding error in steps this fine.
_FINE = 254


@dataclass(frozen=True)
class Int8Matrix(AsStored):
    """A weight as int8 codes and a scale for each row.

    On a CPU with integer dot products the activations are split in two int8 numbers each, 16 bits in all: the products
    are sums of integers, hence exact, and a row's result does not depend on the rows beside it. That takes half the
    time of float32. (With activations of 8 bits it would take a third, and outliers would lose digits.) On CUDA it is
    the product of LLM.int8(): activations of 8 bits, columns with outliers apart.

    Args:
        shape: Rows and columns of the weight.
    """

    shape: tuple[int, int]

    @property
    def stored(self) -> tuple[Part, ...]:
        """Codes and scales."""
        rows, _ = self.shape
        return (Part("codes", torch.int8, self.shape), Part("scales", torch.float32, (rows,)))

    def quantize(self, weight: Tensor, *, is_fitted: bool) -> dict[str, Tensor]:
        """Returns codes and scales; there is nothing to fit."""
        wide = weight.detach().float()
        scales = wide.abs().amax(dim=1) / _LEVELS  # [out]
        codes = (wide / torch.where(scales == 0, 1.0, scales).unsqueeze(1)).round_().to(torch.int8)
        return {"codes": codes, "scales": scales}

    def product(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Multiplies rows ``[T, in]``: ``[T, out]``."""
        codes, scales = parts["codes"], parts["scales"]
        if has_int8_product(rows.device):
            return int8_product(codes, scales, rows)
        if rows.is_cuda:
            return functional.linear(rows, self.widen(parts, rows.dtype))
        wide = rows.float()
        product = _split_product(wide, codes) if _HAS_DOT_PRODUCTS else functional.linear(wide, codes.float())
        return product.mul_(scales).to(rows.dtype)

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Returns the weight ``[out, in]``."""
        return (parts["codes"].float() * parts["scales"].unsqueeze(1)).to(dtype)


# Without them the integer product is either slow or adds pairs in 16 bits, which overflow.
_HAS_DOT_PRODUCTS: bool = getattr(torch.cpu, "_is_vnni_supported", lambda: False)()


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
