"""FBGEMM's product with 8-bit codes that have one scale per row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarm_plugins.noise import without_quantized_remark
from swarm_plugins.weights.formats.int8 import Int8Format
from swarm_plugins.weights.kernel import EncodingKernel

# Activations have codes from -127 to 127, and their rounding errors are counted in steps 254 times as fine. A product
# would turn a Python number into a tensor.
_STEP, _FINE = torch.tensor(1 / 127.0, dtype=torch.float32), torch.tensor(254.0, dtype=torch.float32)
_UNIT = 1 / 254.0
_TINY = torch.finfo(torch.float32).tiny
_ZERO = 128
"""The code of an activation of 0: FBGEMM's activations have no sign."""


@dataclass(frozen=True)
class Int8FbgemmKernel(EncodingKernel):
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
        # `has_fbgemm` notices when their end has come.
        with without_quantized_remark():
            codes = torch._make_per_channel_quantized_tensor(stored["codes"].contiguous(), scales, zeros, 0)
        return {"packed": torch.ops.quantized.linear_prepack(codes, None)}

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both halves of all rows, ``[2 T, in]``, and the scales of the rows, ``[T, 1]``."""
        wide = rows.float()
        # At least the smallest normal number: a row of zeros stays one.
        scales = wide.abs().amax(dim=1, keepdim=True).mul_(_STEP).clamp_(min=_TINY)
        steps = wide / scales
        coarse = steps.round()
        return torch.cat((coarse, steps.sub_(coarse).mul_(_FINE))), scales

    def product_of(self, parts: Mapping[str, Any], encoded: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        halves, scales = encoded
        count = scales.shape[0]
        if count == 0:
            return halves.new_zeros(0, self.format.shape[0], dtype=dtype)
        sums: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            halves, 1.0, _ZERO, parts["packed"]
        )
        return sums[:count].add_(sums[count:], alpha=_UNIT).mul_(scales).to(dtype)

    def widen(self, parts: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
        weight: Tensor = torch.ops.quantized.linear_unpack(parts["packed"])[0]
        return weight.dequantize().to(dtype)
