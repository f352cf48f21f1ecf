"""torch's own products with floating weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.kernel import Kernel

_MOST_ROWS = 3
"""Most rows of a product in halves; oneDNN is faster for more."""


@dataclass(frozen=True)
class PlainKernel(Kernel):
    """What `torch.nn.Linear` does."""

    format: PlainFormat

    def product(self, parts: Mapping[str, Any], rows: Tensor) -> Tensor:
        weight: Tensor = parts["codes"]
        return functional.linear(rows.to(weight.dtype), weight).to(rows.dtype)


@dataclass(frozen=True)
class HalvesKernel(PlainKernel):
    """The same weight, whose upper and lower half are multiplied with a few rows as a batch of two."""

    def product(self, parts: Mapping[str, Any], rows: Tensor) -> Tensor:
        if are_for_halves(rows, parts["codes"]):
            return product_in_halves(rows, parts["codes"], None)
        return super().product(parts, rows)


def are_for_halves(rows: Tensor, weight: Tensor) -> bool:
    """Returns whether rows ``[T, in]`` are multiplied in halves with a weight ``[out, in]``: few, without gradients.

    Only float32 gains: MKL multiplies one to three rows of it as a matrix by a vector, which on processors of AMD reads
    memory at half its speed, but leaves a batch to its other product.
    """
    return (
        0 < rows.shape[0] <= _MOST_ROWS
        and rows.dtype == weight.dtype == torch.float32
        and weight.shape[0] % 2 == 0
        and not torch.is_grad_enabled()
    )


def product_in_halves(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies a few rows ``[T, in]`` by a contiguous weight ``[out, in]``: ``[T, out]``."""
    count, width = rows.shape
    halves = torch.bmm(weight.view(2, -1, width), rows.t().expand(2, width, count))  # [2, out / 2, T]
    product = halves.view(-1, count).t()
    return product if bias is None else product + bias
