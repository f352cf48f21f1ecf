"""oneDNN's product with a weight in an order of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.kernel import Kernel

# The order is chosen for a number of rows. It serves one row as well.
_ROWS = 64


@dataclass(frozen=True)
class OneDnnKernel(Kernel):
    """Products in the type of the weight, summed in float32. A row's result does not depend on the other rows."""

    format: PlainFormat

    @property
    def is_opaque(self) -> bool:
        return True

    def prepare(self, stored: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"packed": torch.ops.mkldnn._reorder_linear_weight(stored["codes"].contiguous(), _ROWS)}

    def product(self, parts: Mapping[str, Any], rows: Tensor) -> Tensor:
        inputs = rows.to(self.format.dtype)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, parts["packed"], None, "none", [], "")
        return product.to(rows.dtype)

    def widen(self, parts: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
        return parts["packed"].to_dense().to(dtype)  # type: ignore[no-any-return]


def has_onednn(dtype: torch.dtype) -> bool:
    """Returns whether this machine packs weights of a type; for 16 bits it needs instructions for them."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
