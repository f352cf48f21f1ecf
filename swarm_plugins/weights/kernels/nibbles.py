"""Products with 8-bit codes in groups by torch's product with 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.weights.formats.nibbles import NibblesFormat
from swarm_plugins.weights.kernel import Kernel
from swarm_plugins.weights.kernels.int4pack import MOST_ROWS, Int4PackKernel
from swarm_plugins.weights.stored import Part


@dataclass(frozen=True)
class NibblesKernel(Kernel):
    """Rounds activations to bfloat16, and sums both halves in float32; products of many rows widen the weight."""

    format: NibblesFormat

    @property
    def computed(self) -> tuple[Part, ...]:
        return self._halves.computed

    @property
    def is_converted(self) -> bool:
        return self._halves.is_converted

    def convert(self, stored: Mapping[str, Tensor], computed: Mapping[str, Tensor]) -> None:
        self._halves.convert(stored, computed)

    def product(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        if rows.shape[0] > MOST_ROWS:
            return functional.linear(rows, self.widen(parts, rows.dtype))
        return self._halves.product(parts, torch.cat([rows, rows], dim=1))

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        if not self.is_converted:
            return self.format.widen(parts, dtype)
        high, low = self._halves.widen(parts, torch.float32).chunk(2, dim=1)
        return (high + low).to(dtype)

    @property
    def _halves(self) -> Int4PackKernel:
        return Int4PackKernel(self.format.halves)
