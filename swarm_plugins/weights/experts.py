"""Fused experts with weights in a stored format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from swarm_plugins.moe import EXPERT_PARAMETERS
from swarm_plugins.moe.frozen import run_frozen
from swarm_plugins.weights.choice import format_of, kernel_for
from swarm_plugins.weights.stored import StoredFormat
from swarm_plugins.weights.widths import Width


class PackedExperts(nn.Module):
    """The weights of one fused parameter, expert by expert: each part is stacked, ``[E, ...]``."""

    def __init__(self, stored: StoredFormat, experts: list[dict[str, Tensor]], *, is_transposed: bool) -> None:
        super().__init__()
        rows, columns = stored.shape
        self.shape = (len(experts), columns, rows) if is_transposed else (len(experts), rows, columns)
        """As HF stores the parameter."""
        device = next(iter(experts[0].values())).device
        self._kernel = kernel_for(stored, device)
        prepared = [self._kernel.prepare(parts) for parts in experts]
        for part in self._kernel.computed:
            self.register_buffer(part.name, torch.stack([parts[part.name] for parts in prepared]))

    def product(self, expert: int, rows: Tensor) -> Tensor:
        """Multiplies rows ``[T, in]`` by an expert's weight, without gradients: ``[T, out]``."""
        return self._kernel.product(self._parts(expert), rows)

    def weight(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Returns the widened weight of an expert, ``[out, in]``."""
        return self._kernel.widen(self._parts(expert), dtype)

    def _parts(self, expert: int) -> dict[str, Tensor]:
        return {part.name: getattr(self, part.name)[expert] for part in self._kernel.computed}


class _RunsPacked:
    """Mixed into a family's experts class: runs the experts from packed weights."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the experts; the flags of transformers' experts registry are honored."""
        return run_frozen(self, (), hidden_states, top_k_index, top_k_weights)


def quantize_experts(module: Any, bits: Width) -> None:
    """Replaces the weights of fused experts by such in few bits, in place."""
    if not module._parameters:
        return  # at other peers
    is_transposed = bool(module.is_transposed)
    for name in EXPERT_PARAMETERS:
        parameter = getattr(module, name, None)
        if isinstance(parameter, nn.Parameter):
            weights = [(one.T if is_transposed else one).contiguous() for one in parameter.detach()]
            stored = format_of((int(weights[0].shape[0]), int(weights[0].shape[1])), bits)
            experts = [stored.quantize(weight, is_fitted=False) for weight in weights]
            delattr(module, name)
            setattr(module, name, PackedExperts(stored, experts, is_transposed=is_transposed))
    run_packed(module)


def run_packed(module: nn.Module) -> None:
    """Makes fused experts run from packed weights, which some of their parameters have become."""
    plain = type(module)
    if issubclass(plain, _RunsPacked):
        return
    module.__class__ = type(f"Packed{plain.__name__}", (_RunsPacked, plain), {"__module__": plain.__module__})
