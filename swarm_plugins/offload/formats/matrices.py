"""One weight in few bits: the seam between the formats of a matrix and what holds them (experts, linear layers)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["AsStored", "MatrixFormat", "Part", "multiply"]


class Part(NamedTuple):
    """One tensor of a weight: its codes, or its scales."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class MatrixFormat(Protocol):
    """A weight ``[out, in]`` as a few tensors."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        ...

    @property
    def stored(self) -> tuple[Part, ...]:
        """The parts on disk."""
        ...

    @property
    def computed(self) -> tuple[Part, ...]:
        """The parts that products use."""
        ...

    @property
    def is_converted(self) -> bool:
        """Whether stored parts have to be converted before they are multiplied with."""
        ...

    def quantize(self, weight: Tensor, *, is_fitted: bool) -> dict[str, Tensor]:
        """Returns the stored parts of a weight.

        Args:
            weight: ``[out, in]``, any floating type.
            is_fitted: Take the time to make the error small.
        """
        ...

    def convert(self, stored: Mapping[str, Tensor], computed: Mapping[str, Tensor]) -> None:
        """Fills computed parts from stored ones."""
        ...

    def product(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Multiplies rows ``[T, in]`` by computed parts, without gradients: ``[T, out]`` in the type of the rows."""
        ...

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Returns the weight ``[out, in]`` of computed parts."""
        ...


class AsStored:
    """Mixin for formats that multiply with the stored parts themselves."""

    @property
    def stored(self) -> tuple[Part, ...]:
        """The parts on disk."""
        raise NotImplementedError

    @property
    def computed(self) -> tuple[Part, ...]:
        """The stored parts."""
        return self.stored

    @property
    def is_converted(self) -> bool:
        """Never."""
        return False

    def convert(self, stored: Mapping[str, Tensor], computed: Mapping[str, Tensor]) -> None:
        """Copies."""
        for name, tensor in computed.items():
            tensor.copy_(stored[name])


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
