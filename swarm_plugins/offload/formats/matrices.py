"""One weight in few bits: the seam between the formats of a matrix and what holds them (experts, linear layers)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Part(NamedTuple):
    """One tensor of a weight: its codes, or its scales."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class MatrixFormat(ABC):
    """A weight ``[out, in]`` as a few tensors; by default products use the stored ones as they are."""

    shape: tuple[int, int]
    """Rows and columns of the weight."""

    @property
    @abstractmethod
    def stored(self) -> tuple[Part, ...]:
        """The parts on disk."""

    @property
    def computed(self) -> tuple[Part, ...]:
        """The parts that products use."""
        return self.stored

    @property
    def is_converted(self) -> bool:
        """Whether stored parts have to be converted before they are multiplied with."""
        return False

    @abstractmethod
    def quantize(self, weight: Tensor, *, is_fitted: bool) -> dict[str, Tensor]:
        """Returns the stored parts of a weight ``[out, in]``, with a small error if there is time to fit."""

    def convert(self, stored: Mapping[str, Tensor], computed: Mapping[str, Tensor]) -> None:
        """Fills computed parts from stored ones."""
        for name, tensor in computed.items():
            tensor.copy_(stored[name])

    @abstractmethod
    def product(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Multiplies rows ``[T, in]`` by computed parts, without gradients: ``[T, out]`` in the type of the rows."""

    @abstractmethod
    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Returns the weight ``[out, in]`` of computed parts."""


def multiply(matrix: MatrixFormat, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    """Multiplies rows ``[T, in]`` by computed parts; gradients flow to the rows, without keeping a wide weight."""
    if torch.is_grad_enabled() and rows.requires_grad:
        result: Tensor = _Product.apply(rows, matrix, parts)  # type: ignore[no-untyped-call]
        return result
    return matrix.product(parts, rows)


class _Product(torch.autograd.Function):
    """A product that widens its weight again for the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: MatrixFormat, parts: Mapping[str, Tensor]) -> Tensor:
        ctx.matrix, ctx.parts = matrix, parts
        return matrix.product(parts, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight = ctx.matrix.widen(ctx.parts, grad.dtype)
        return functional.linear(grad, weight.T), None, None
