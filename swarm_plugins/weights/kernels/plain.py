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

_MOST_ROWS = {torch.float32: 3, torch.bfloat16: 1}
"""Most rows of `product_of_few`, by type; oneDNN is faster for more."""


@dataclass(frozen=True)
class PlainKernel(Kernel):
    """What `torch.nn.Linear` does."""

    format: PlainFormat

    def product(self, parts: Mapping[str, Any], rows: Tensor) -> Tensor:
        weight: Tensor = parts["codes"]
        return functional.linear(rows.to(weight.dtype), weight).to(rows.dtype)


@dataclass(frozen=True)
class FewRowsKernel(PlainKernel):
    """The same weight, with which a few rows are multiplied in another way; see `product_of_few`."""

    def product(self, parts: Mapping[str, Any], rows: Tensor) -> Tensor:
        if are_few(rows, parts["codes"]):
            return product_of_few(rows, parts["codes"], None)
        return super().product(parts, rows)


def are_few(rows: Tensor, weight: Tensor) -> bool:
    """Returns whether `product_of_few` multiplies rows ``[T, in]`` with a weight ``[out, in]``: a few, no gradients."""
    return (
        0 < rows.shape[0] <= _MOST_ROWS.get(weight.dtype, 0)
        and rows.dtype == weight.dtype
        and weight.shape[0] % 2 == 0
        and not torch.is_grad_enabled()
    )


def product_of_few(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies a few rows ``[T, in]`` by a contiguous weight ``[out, in]`` on a CPU: ``[T, out]``.

    In float32, the upper and lower half of the weight are a batch of two: MKL multiplies one to three rows as a matrix
    by a vector, which on processors of AMD reads memory at half its speed, but leaves a batch to its other product. In
    bfloat16, torch multiplies one row itself, in half the time that oneDNN takes.
    """
    if weight.dtype == torch.bfloat16:
        return _without_onednn(rows, weight, bias)
    count, width = rows.shape
    halves = torch.bmm(weight.view(2, -1, width), rows.t().expand(2, width, count))  # [2, out / 2, T]
    product = halves.view(-1, count).t()
    return product if bias is None else product + bias


def has_own_bfloat16() -> bool:
    """Returns whether this build of torch multiplies bfloat16 both by oneDNN and without it."""
    return torch.backends.mkldnn.is_available() and getattr(torch._C, "_get_mkldnn_enabled", lambda: False)()


def _without_onednn(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # `torch.backends.mkldnn.flags` takes 8 us. The switch is the process's: another thread's product may meanwhile go
    # the same way, which changes its time alone.
    torch._C._set_mkldnn_enabled(False)
    try:
        return functional.linear(rows, weight, bias)
    finally:
        torch._C._set_mkldnn_enabled(True)
