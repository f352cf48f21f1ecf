"""What the bytes of an expert mean: all its tensors in one buffer, in a floating type or in few bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.errors import CheckpointError
from swarm_plugins.offload.interfaces import BufferLayout, ExpertFormat, ExpertKey
from swarm_plugins.weights.choice import format_of, half_type, kernel_for, width_on
from swarm_plugins.weights.kernel import Kernel, multiply
from swarm_plugins.weights.stored import Part, QuantizingFormat, StoredFormat
from swarm_plugins.weights.widths import Width

# Without its sign, a number from here on is infinite or NaN.
_LIMITS = {torch.bfloat16: (torch.int16, np.uint16, 0xFF00), torch.float32: (torch.int32, np.uint32, 0xFF000000)}


def expert_format(
    stored: BufferLayout, bits: Width | None, dtype: torch.dtype, device: torch.device, *, is_transposed: bool
) -> ExpertFormat:
    """Returns the format of experts that are stored in a floating type, weights as ``[in, out]`` if transposed.

    They get some bits in memory, None for as wide as the type to compute in.
    """
    if bits in (None, 16):
        return PlainFormat(stored, dtype if bits is None else half_type(dtype), is_transposed=is_transposed)
    return QuantizedOnReading(stored, width_on(bits, device), device, is_transposed=is_transposed)


class PlainFormat:
    """Experts in a floating type; weights stay as in the checkpoint, or are cast once when they are read.

    Biases keep their type and are cast when they are added.
    """

    def __init__(self, stored: BufferLayout, dtype: torch.dtype, *, is_transposed: bool = False) -> None:
        self.stored = stored
        self.computed = stored
        if any(spec.dtype != dtype for spec in stored.tensors if len(spec.shape) == 2):
            self.computed = BufferLayout.of(
                [(spec.name, dtype if len(spec.shape) == 2 else spec.dtype, spec.shape) for spec in stored.tensors]
            )
        self._is_transposed = is_transposed

    def check(self, stored: Tensor, key: ExpertKey) -> None:
        """Does nothing: a weight may be any number."""

    def convert(self, stored: Tensor, computed: Tensor) -> None:
        """Casts the tensors of one buffer into another."""
        target = self.computed.views(computed)
        for name, tensor in self.stored.views(stored).items():
            target[name].copy_(tensor)

    def linear(self, tensors: Mapping[str, Tensor], name: str, rows: Tensor) -> Tensor:
        """Multiplies rows ``[T, in]`` by a weight, in the weight's type."""
        weight = tensors[name]
        if self._is_transposed:
            return (rows.to(weight.dtype) @ weight).to(rows.dtype)
        return functional.linear(rows.to(weight.dtype), weight).to(rows.dtype)

    def bias(self, tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
        """Returns the bias of a weight."""
        return tensors[f"{name}_bias"].to(dtype)


class PackedFormat:
    """Experts with weights, and biases, in stored formats, by name; their other tensors stay as is."""

    def __init__(self, formats: Mapping[str, StoredFormat], others: Sequence[Part], device: torch.device) -> None:
        self._kernels: dict[str, Kernel] = {name: kernel_for(one, device) for name, one in formats.items()}
        self._others = tuple(part.name for part in others)
        self.stored = BufferLayout.of([*(part for name, one in formats.items() for part in _named(name, one)), *others])
        self.computed = self.stored
        if any(one.is_converted for one in self._kernels.values()):
            self.computed = BufferLayout.of(
                [*(part for name, one in self._kernels.items() for part in _named(name, one)), *others]
            )
        self._keys = {name: {part.name: f"{name}.{part.name}" for part in one.parts} for name, one in formats.items()}

    def convert(self, stored: Tensor, computed: Tensor) -> None:
        self.convert_tensors(self.stored.views(stored), computed)

    def convert_tensors(self, stored: Mapping[str, Tensor], computed: Tensor) -> None:
        """Fills a buffer to compute with from stored tensors."""
        views = self.computed.views(computed)
        for name, kernel in self._kernels.items():
            kernel.convert(self._parts(stored, name), self._parts(views, name))
        for name in self._others:
            views[name].copy_(stored[name])

    def linear(self, tensors: Mapping[str, Tensor], name: str, rows: Tensor) -> Tensor:
        return multiply(self._kernels[name], self._parts(tensors, name), rows)

    def bias(self, tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
        """Returns the bias of a weight; one in a stored format has a column."""
        own = f"{name}_bias"
        if own in self._kernels:
            return self._kernels[own].widen(self._parts(tensors, own), dtype).flatten()
        return tensors[own].to(dtype)

    def _parts(self, tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        return {part: tensors[key] for part, key in self._keys[name].items()}


class QuantizedFormat(PackedFormat):
    """Experts that the store holds quantized, from plain weights ``[out, in]``; tensors of one dimension stay as is."""

    def __init__(self, plain: BufferLayout, bits: Width, device: torch.device) -> None:
        self._quantizing: dict[str, QuantizingFormat] = {
            spec.name: format_of((spec.shape[0], spec.shape[1]), bits) for spec in plain.tensors if len(spec.shape) == 2
        }
        others = [Part(spec.name, spec.dtype, spec.shape) for spec in plain.tensors if len(spec.shape) != 2]
        super().__init__(self._quantizing, others, device)

    def quantize(self, tensors: Mapping[str, Tensor], *, is_fitted: bool) -> dict[str, Tensor]:
        """Returns the tensors of an expert's stored buffer from its own, weights as ``[out, in]``."""
        found = {name: tensors[name] for name in self._others}
        for name, stored in self._quantizing.items():
            parts = stored.quantize(tensors[name], is_fitted=is_fitted)
            found.update({self._keys[name][part]: tensor for part, tensor in parts.items()})
        return found

    def check(self, stored: Tensor, key: ExpertKey) -> None:
        """Checks the scales of an expert: a single bad one makes every answer worthless.

        Raises:
            CheckpointError: If one is not finite.
        """
        for spec in self.stored.tensors:
            if spec.name.endswith(".scales"):
                scales = stored[spec.offset : spec.offset + spec.num_bytes].view(spec.dtype)
                if not are_finite(scales):
                    raise CheckpointError(
                        f"{spec.name} of expert {key.expert} in layer {key.layer} holds numbers that are not finite: "
                        "the store is damaged, fetch it again or run swarm quantize again"
                    )


class QuantizedOnReading:
    """Experts that are quantized as they are read, by rounding to the nearest."""

    def __init__(self, plain: BufferLayout, bits: Width, device: torch.device, *, is_transposed: bool = False) -> None:
        self.stored = plain
        self._is_transposed = is_transposed
        self._format = QuantizedFormat(turned(plain) if is_transposed else plain, bits, device)
        self.computed = self._format.computed
        self.linear = self._format.linear
        self.bias = self._format.bias

    def check(self, stored: Tensor, key: ExpertKey) -> None:
        """Does nothing: a weight may be any number."""

    def convert(self, stored: Tensor, computed: Tensor) -> None:
        tensors = self.stored.views(stored)
        if self._is_transposed:
            tensors = turn(tensors)
        self._format.convert_tensors(self._format.quantize(tensors, is_fitted=False), computed)


def turned(layout: BufferLayout) -> BufferLayout:
    """Returns the layout with weights ``[in, out]`` as ``[out, in]``."""
    return BufferLayout.of([(one.name, one.dtype, one.shape[::-1]) for one in layout.tensors])


def turn(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns an expert's tensors with weights ``[in, out]`` as ``[out, in]``."""
    return {name: one.T if one.dim() == 2 else one for name, one in tensors.items()}


def _named(name: str, one: StoredFormat | Kernel) -> list[Part]:
    parts = one.computed if isinstance(one, Kernel) else one.parts
    return [part._replace(name=f"{name}.{part.name}") for part in parts]


def are_finite(scales: Tensor) -> bool:
    """Returns whether all numbers of a bfloat16 or float32 tensor on the CPU are finite."""
    integers, unsigned, limit = _LIMITS[scales.dtype]
    # numpy, as torch would start threads of its own on every reader thread.
    bits = scales.view(integers).numpy().view(unsigned)
    return bits.size == 0 or int((bits << 1).max()) < limit
