"""Products that widen their weight each time: right for every format and device, fast for none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from swarm_plugins.weights.kernel import Kernel
from swarm_plugins.weights.stored import StoredFormat


@dataclass(frozen=True)
class WideningKernel(Kernel):
    """Widens the weight to the type of the rows for each product."""

    format: StoredFormat

    def product(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        return functional.linear(rows, self.widen(parts, rows.dtype))
