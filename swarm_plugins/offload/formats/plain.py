"""Experts in a floating type, as the checkpoint has them or cast once when they are read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.offload.interfaces import BufferLayout

__all__ = ["PlainFormat"]


class PlainFormat:
    """Weights to multiply with as they are.

    Args:
        stored: How an expert lies in its buffer after reading.
        dtype: Floating type to compute in.
        is_transposed: Whether weights lie as ``[in, out]``.
    """

    def __init__(self, stored: BufferLayout, dtype: torch.dtype, *, is_transposed: bool = False) -> None:
        self.stored = stored
        self.computed = stored
        if any(spec.dtype != dtype for spec in stored.tensors):
            self.computed = BufferLayout.of([(spec.name, dtype, spec.shape) for spec in stored.tensors])
        self._is_transposed = is_transposed

    def convert(self, stored: Tensor, computed: Tensor) -> None:
        """Casts the tensors of one buffer into another."""
        target = self.computed.views(computed)
        for name, tensor in self.stored.views(stored).items():
            target[name].copy_(tensor)

    def linear(self, tensors: Mapping[str, Tensor], name: str, rows: Tensor) -> Tensor:
        """Multiplies rows, ``[T, in]``, by a weight, in the weight's type."""
        weight = tensors[name]
        if self._is_transposed:
            return (rows.to(weight.dtype) @ weight).to(rows.dtype)
        return functional.linear(rows.to(weight.dtype), weight).to(rows.dtype)
