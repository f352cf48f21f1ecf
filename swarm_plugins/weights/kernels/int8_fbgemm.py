"""FBGEMM's product with 8-bit codes that have one scale per row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarm_plugins.weights.formats.int8 import Int8Format
from swarm_plugins.weights.kernel import Kernel

_LEVELS = 127.0
# The second half of an activation is its rounding error in steps this fine.
_FINE = 254.0
_ZERO = 128
"""The code of an activation of 0: FBGEMM's activations have no sign."""


@dataclass(frozen=True)
class Int8FbgemmKernel(Kernel):
    """Splits each activation into two 8-bit numbers, 16 bits in all, with one scale per row of activations.

    Both halves go through one product whose activations have a scale of 1, so that FBGEMM neither looks for their range
    nor rounds them again: products are sums of integers, hence exact, and a row's result does not depend on the others.
    """

    format: Int8Format

    @property
    def is_opaque(self) -> bool:
        return True

    def prepare(self, stored: Mapping[str, Tensor]) -> dict[str, Any]:
        scales = stored["scales"].double()
        # A row of zeros has a scale of 0, which torch refuses.
        scales = torch.where(scales == 0, 1.0, scales)
        zeros = torch.zeros(self.format.shape[0], dtype=torch.int64)
        codes = torch._make_per_channel_quantized_tensor(stored["codes"].contiguous(), scales, zeros, 0)
        return {"packed": torch.ops.quantized.linear_prepack(codes, None)}

    def product(self, parts: Mapping[str, Any], rows: Tensor) -> Tensor:
        count = rows.shape[0]
        if count == 0:
            return rows.new_zeros(0, self.format.shape[0])
        wide = rows.float()
        scales = wide.abs().amax(dim=1, keepdim=True).div_(_LEVELS)  # [T, 1]
        # At least the smallest normal number: a row of zeros stays one.
        steps = wide / scales.clamp_(min=torch.finfo(torch.float32).tiny)
        halves = steps.new_empty(2 * count, steps.shape[1])
        coarse = torch.round(steps, out=halves[:count])
        torch.sub(steps, coarse, out=halves[count:]).mul_(_FINE)
        sums: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            halves, 1.0, _ZERO, parts["packed"]
        )
        return sums[:count].add_(sums[count:], alpha=1 / _FINE).mul_(scales).to(rows.dtype)

    def widen(self, parts: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
        weight: Tensor = torch.ops.quantized.linear_unpack(parts["packed"])[0]
        return weight.dequantize().to(dtype)
