"""A slice of an expert: some of its inner neurons, whose summand of the output it computes.

Expert slicing as in DeepSpeed-MoE (Rajbhandari et al. 2022, section 5.2): the first product's output and the second
one's input are cut alike, and the parts' outputs add up to the expert's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.formats.experts import PlainFormat
from swarm_plugins.offload.interfaces import BufferLayout, TensorSpec


class SlicedFormat:
    """Keeps the k-th of n parts of experts in a floating type; an `ExpertFormat`.

    Args:
        whole: The format of whole experts.
        part: ``(k, n)``, k from 0.
        is_transposed: Whether weights lie as ``[in, out]``.
        is_concatenated: Whether gate and up projections lie one after the other, not interleaved.

    Raises:
        ConfigError: If n does not divide the inner dimension.
    """

    def __init__(
        self, whole: PlainFormat, part: tuple[int, int], *, is_transposed: bool, is_concatenated: bool
    ) -> None:
        self.stored = whole.stored
        self.linear = whole.linear
        self.bias = whole.bias
        self.check = whole.check
        self._part = part
        self._is_transposed = is_transposed
        self._is_concatenated = is_concatenated
        down = next(spec for spec in whole.computed.tensors if spec.name == "down_proj")
        inner = down.shape[0 if is_transposed else 1]
        if inner % part[1]:
            raise ConfigError(
                f"experts with {inner} inner neurons cannot be cut into {part[1]} equal parts: expected one of "
                f"{', '.join(str(count) for count in range(1, min(inner, 64) + 1) if inner % count == 0)}"
            )
        self._size = inner // part[1]
        kept = [
            (spec.name, spec.dtype, self._kept(spec, torch.empty(spec.shape, device="meta")).shape)
            for spec in whole.computed.tensors
        ]
        self.computed = BufferLayout.of([(name, dtype, tuple(shape)) for name, dtype, shape in kept])

    def convert(self, stored: Tensor, computed: Tensor) -> None:
        """Copies a slice of a stored expert, cast if need be."""
        target: Mapping[str, Tensor] = self.computed.views(computed)
        tensors = self.stored.views(stored)
        for spec in self.stored.tensors:
            target[spec.name].copy_(self._kept(spec, tensors[spec.name]))

    def _kept(self, spec: TensorSpec, tensor: Tensor) -> Tensor:
        index = self._part[0]
        if spec.name == "down_proj_bias":
            # Added once.
            return tensor if index == 0 else torch.zeros_like(tensor)
        if spec.name == "down_proj":
            return tensor.narrow(0 if self._is_transposed else 1, index * self._size, self._size)
        dim = 1 if self._is_transposed and tensor.ndim == 2 else 0
        if not spec.name.startswith("gate_up"):
            return tensor.narrow(dim, index * self._size, self._size)
        if not self._is_concatenated:
            return tensor.narrow(dim, 2 * index * self._size, 2 * self._size)
        halves = tensor.chunk(2, dim=dim)
        return torch.cat([half.narrow(dim, index * self._size, self._size) for half in halves], dim=dim)
