"""FBGEMM's product with weights in float16 and activations in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.kernel import EncodingKernel

# A rounding unit of bfloat16: float16 loses more of a weight only where it is very small.
_MOST_LOST = 2.0**-9


@dataclass(frozen=True)
class Fp16Kernel(EncodingKernel):
    """Sums in float32; a row's result does not depend on the other rows."""

    format: PlainFormat

    @property
    def is_opaque(self) -> bool:
        return True

    def prepare(self, stored: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"packed": torch.ops.quantized.linear_prepack_fp16(stored["codes"].float().contiguous(), None)}

    def takes(self, stored: Mapping[str, Tensor]) -> bool:
        """Returns whether the weight is in the range of float16: neither too large for it nor lost in its steps."""
        wide = stored["codes"].float()
        lost = (wide - wide.half().float()).norm()  # infinite or NaN if one number is too large
        return bool(lost <= _MOST_LOST * wide.norm())

    def encode(self, rows: Tensor) -> Tensor:
        return rows.float()

    def product_of(self, parts: Mapping[str, Any], encoded: Tensor, dtype: torch.dtype) -> Tensor:
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16(encoded, parts["packed"])
        return product.to(dtype)

    def widen(self, parts: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
        weight: Tensor = torch.ops.quantized.linear_unpack_fp16(parts["packed"])[0]
        return weight.to(dtype)


def has_fbgemm() -> bool:
    """Returns whether this build of torch has FBGEMM, and this processor what it needs."""
    # Both operators are announced to be removed from torch some day.
    known = all(hasattr(torch.ops.quantized, name) for name in ("linear_dynamic_fp16", "linear_unpack"))
    return known and "fbgemm" in torch.backends.quantized.supported_engines
