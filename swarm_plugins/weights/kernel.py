"""The seam between how products with a weight are formed and what holds the weight (experts, linear layers)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from swarm_plugins.weights.stored import Part, StoredFormat


class Kernel(ABC):
    """Forms products with a weight of some format; by default with its stored parts as they are."""

    format: StoredFormat

    @property
    def is_opaque(self) -> bool:
        """Whether `prepare` returns objects of a library, which cannot lie in a buffer, instead of ``computed``."""
        return False

    @property
    def computed(self) -> tuple[Part, ...]:
        """The parts that products use."""
        return self.format.parts

    @property
    def is_converted(self) -> bool:
        """Whether stored parts have to be converted before they are multiplied with."""
        return False

    def convert(self, stored: Mapping[str, Tensor], computed: Mapping[str, Tensor]) -> None:
        """Fills computed parts from stored ones."""
        for name, tensor in computed.items():
            tensor.copy_(stored[name])

    def takes(self, stored: Mapping[str, Tensor]) -> bool:
        """Returns whether the numbers of a weight are in the kernel's range."""
        return True

    @abstractmethod
    def product(self, parts: Mapping[str, Any], rows: Tensor) -> Tensor:
        """Multiplies rows ``[T, in]`` by computed parts, without gradients: ``[T, out]`` in the type of the rows."""

    def widen(self, parts: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
        """Returns the weight ``[out, in]`` of computed parts."""
        return self.format.widen(parts, dtype)

    def prepare(self, stored: Mapping[str, Tensor]) -> dict[str, Any]:
        """Returns computed parts for stored ones: these themselves where nothing has to be converted."""
        if not self.is_converted:
            return dict(stored)
        computed = {part.name: torch.empty(part.shape, dtype=part.dtype, device="cpu") for part in self.computed}
        self.convert(stored, computed)
        return computed


class EncodingKernel(Kernel):
    """A kernel that first brings activations into another form, which products with several weights can share."""

    @abstractmethod
    def encode(self, rows: Tensor) -> Any:
        """Returns rows ``[T, in]`` in the form that `product_of` takes."""

    @abstractmethod
    def product_of(self, parts: Mapping[str, Any], encoded: Any, dtype: torch.dtype) -> Tensor:
        """Multiplies encoded rows by computed parts, without gradients: ``[T, out]`` in a type."""

    def product(self, parts: Mapping[str, Any], rows: Tensor) -> Tensor:
        return self.product_of(parts, self.encode(rows), rows.dtype)


def multiply(kernel: Kernel, parts: Mapping[str, Any], rows: Tensor) -> Tensor:
    """Multiplies rows ``[T, in]`` by computed parts; gradients flow to the rows, without keeping a wide weight."""
    if torch.is_grad_enabled() and rows.requires_grad:
        result: Tensor = _Product.apply(rows, kernel, parts)  # type: ignore[no-untyped-call]
        return result
    return kernel.product(parts, rows)


def gradient(kernel: Kernel, parts: Mapping[str, Any], grad: Tensor) -> Tensor:
    """Returns the gradient of a product's rows, ``[T, in]``, for that of its result, ``[T, out]``."""
    return functional.linear(grad, kernel.widen(parts, grad.dtype).T)


class _Product(torch.autograd.Function):
    """A product that widens its weight again for the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, kernel: Kernel, parts: Mapping[str, Any]) -> Tensor:
        ctx.kernel, ctx.parts = kernel, parts
        return kernel.product(parts, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gradient(ctx.kernel, ctx.parts, grad), None, None
