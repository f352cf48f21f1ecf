"""torch's own product with floating weights, in two layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.kernel import Kernel

FEWEST_ROWS = 4
"""oneDNN multiplies from so many rows on."""


@dataclass(frozen=True)
class PlainKernel(Kernel):
    """What `torch.nn.Linear` does."""

    format: PlainFormat

    def product(self, parts: Mapping[str, Any], rows: Tensor) -> Tensor:
        weight: Tensor = parts["codes"]
        return functional.linear(rows.to(weight.dtype), weight).to(rows.dtype)


@dataclass(frozen=True)
class TurnedKernel(PlainKernel):
    """The same with columns that lie one behind the other: ``[in, out]`` in memory, ``[out, in]`` to its users.

    A product with one row then adds up rows of memory, which some BLAS libraries do twice as fast as dot products.
    """

    def product(self, parts: Mapping[str, Any], rows: Tensor) -> Tensor:
        weight: Tensor = parts["codes"]
        if is_for_onednn(rows):
            return onednn_product(rows, weight, None)
        return functional.linear(rows, weight)

    def prepare(self, stored: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"codes": turned(stored["codes"])}


def is_for_onednn(rows: Tensor) -> bool:
    """Returns whether oneDNN multiplies rows by a turned weight faster than BLAS: more than two or three."""
    is_known = rows.device.type == "cpu" and rows.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    return is_known and rows.shape[0] >= FEWEST_ROWS and not torch.is_grad_enabled()


def onednn_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies rows ``[T, in]`` by a plain weight ``[out, in]`` of any layout; torch leaves float32 to BLAS."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return result


def is_turned(weight: Tensor) -> bool:
    """Returns whether the columns of a weight ``[out, in]`` lie one behind the other."""
    return weight.dim() == 2 and weight.stride(0) == 1 and weight.stride(1) >= weight.shape[0] > 1


def turned(weight: Tensor) -> Tensor:
    """Returns a tensor ``[.., out, in]`` with the same values whose memory is laid out as ``[.., in, out]``."""
    return weight.detach().transpose(-2, -1).contiguous().transpose(-2, -1)
