"""bitsandbytes' products with nf4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from swarm_plugins.weights.bnb import FLOATS, bitsandbytes
from swarm_plugins.weights.formats.nf4 import Nf4Format, quant_state
from swarm_plugins.weights.kernel import Kernel


@dataclass(frozen=True)
class Nf4Kernel(Kernel):
    """On CUDA products of few rows do not widen the weight; a CPU widens it for each."""

    format: Nf4Format

    def product(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        padded = functional.pad(rows, (0, self.format.padded_columns - self.format.shape[1]))
        inputs = (padded if rows.dtype in FLOATS else padded.float()).contiguous()
        state = quant_state(parts, inputs.dtype)
        product: Tensor = bitsandbytes().matmul_4bit(inputs, parts["codes"], quant_state=state)
        return product.to(rows.dtype)
