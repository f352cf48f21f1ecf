"""Experts in few bits: all tensors of an expert in one buffer, quantized beforehand or as it is read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from swarm_plugins.offload.formats.grouped import GroupedMatrix
from swarm_plugins.offload.formats.int8 import Int8Matrix
from swarm_plugins.offload.formats.matrices import MatrixFormat, Part, multiply
from swarm_plugins.offload.formats.nf4 import Nf4Matrix
from swarm_plugins.offload.interfaces import BufferLayout
from swarm_plugins.offload.widths import Width

__all__ = ["QuantizedFormat", "QuantizingFormat", "matrix_format", "turn", "turned"]


def matrix_format(shape: tuple[int, int], bits: Width, device: torch.device) -> MatrixFormat:
    """Returns how a weight is kept.

    Args:
        shape: Rows and columns, ``[out, in]``.
        bits: 8, 4, 3, 2 or ``nf4``.
        device: Where it is multiplied with.
    """
    if bits == 8:
        return Int8Matrix(shape)
    if bits == "nf4":
        return Nf4Matrix(shape)
    return GroupedMatrix(shape, bits, is_for_cpu=device.type == "cpu")


class QuantizedFormat:
    """Experts that lie quantized in the store.

    Args:
        plain: The tensors before they were quantized, weights as ``[out, in]``; what has one dimension stays as it is.
        bits: 8, 4, 3, 2 or ``nf4``.
        device: Where they are multiplied with.
    """

    def __init__(self, plain: BufferLayout, bits: Width, device: torch.device) -> None:
        self._matrices: dict[str, MatrixFormat] = {
            spec.name: matrix_format((spec.shape[0], spec.shape[1]), bits, device)
            for spec in plain.tensors
            if len(spec.shape) == 2
        }
        others = [Part(spec.name, spec.dtype, spec.shape) for spec in plain.tensors if len(spec.shape) != 2]
        self._others = tuple(part.name for part in others)
        self.stored = BufferLayout.of(
            [part for name, one in self._matrices.items() for part in _named(name, one.stored)] + others
        )
        self.computed = self.stored
        if any(one.is_converted for one in self._matrices.values()):
            self.computed = BufferLayout.of(
                [part for name, one in self._matrices.items() for part in _named(name, one.computed)] + others
            )
        self._keys = {
            name: {part.name: f"{name}.{part.name}" for part in one.stored} for name, one in self._matrices.items()
        }

    def quantize(self, tensors: Mapping[str, Tensor], *, is_fitted: bool) -> dict[str, Tensor]:
        """Returns the tensors of an expert's stored buffer.

        Args:
            tensors: The expert's own, weights as ``[out, in]``.
            is_fitted: Take the time to make the error small.
        """
        found = {name: tensors[name] for name in self._others}
        for name, matrix in self._matrices.items():
            parts = matrix.quantize(tensors[name], is_fitted=is_fitted)
            found.update({self._keys[name][part]: tensor for part, tensor in parts.items()})
        return found

    def convert(self, stored: Tensor, computed: Tensor) -> None:
        """Fills a buffer to compute with from a stored one."""
        self.convert_tensors(self.stored.views(stored), computed)

    def convert_tensors(self, stored: Mapping[str, Tensor], computed: Tensor) -> None:
        """Fills a buffer to compute with from stored tensors."""
        views = self.computed.views(computed)
        for name, matrix in self._matrices.items():
            matrix.convert(self._parts(stored, name), self._parts(views, name))
        for name in self._others:
            views[name].copy_(stored[name])

    def linear(self, tensors: Mapping[str, Tensor], name: str, rows: Tensor) -> Tensor:
        """Multiplies rows ``[T, in]`` by a weight: ``[T, out]``."""
        return multiply(self._matrices[name], self._parts(tensors, name), rows)

    def _parts(self, tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        return {part: tensors[key] for part, key in self._keys[name].items()}


class QuantizingFormat:
    """Experts that are quantized as they are read, by rounding to the nearest.

    Args:
        plain: The tensors as they are read.
        bits: 8, 4, 3, 2 or ``nf4``.
        device: Where they are multiplied with.
        is_transposed: Whether weights lie as ``[in, out]``.
    """

    def __init__(self, plain: BufferLayout, bits: Width, device: torch.device, *, is_transposed: bool = False) -> None:
        self.stored = plain
        self._is_transposed = is_transposed
        self._format = QuantizedFormat(turned(plain) if is_transposed else plain, bits, device)
        self.computed = self._format.computed

    def convert(self, stored: Tensor, computed: Tensor) -> None:
        """Quantizes an expert."""
        tensors = self.stored.views(stored)
        if self._is_transposed:
            tensors = turn(tensors)
        self._format.convert_tensors(self._format.quantize(tensors, is_fitted=False), computed)

    def linear(self, tensors: Mapping[str, Tensor], name: str, rows: Tensor) -> Tensor:
        """Multiplies rows ``[T, in]`` by a weight: ``[T, out]``."""
        return self._format.linear(tensors, name, rows)


def turned(layout: BufferLayout) -> BufferLayout:
    """Returns the layout with weights ``[in, out]`` as ``[out, in]``."""
    return BufferLayout.of([(one.name, one.dtype, one.shape[::-1]) for one in layout.tensors])


def turn(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns an expert's tensors with weights ``[in, out]`` as ``[out, in]``."""
    return {name: one.T if one.dim() == 2 else one for name, one in tensors.items()}


def _named(name: str, parts: tuple[Part, ...]) -> list[Part]:
    return [part._replace(name=f"{name}.{part.name}") for part in parts]
