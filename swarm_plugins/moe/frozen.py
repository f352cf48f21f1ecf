"""Experts whose weights are not trained: stored in few bits, or with adapters on them.

The products of one weight run for all rows before the activation, so that adapters can be added in between. Plain
experts without adapters are faster in `run_table`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from swarm_plugins.moe.dispatch import combine, expert_mlp
from swarm_plugins.moe.low_rank import ExpertDelta
from swarm_plugins.moe.routing import Routing


class ExpertWeights(Protocol):
    """The weights of a fused parameter, expert by expert."""

    def product(self, expert: int, rows: Tensor) -> Tensor:
        """Multiplies rows ``[T, in]`` by an expert's weight, without gradients: ``[T, out]`` in the rows' type."""

    def weight(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Returns an expert's weight, ``[out, in]``, in a type."""


def run_frozen(
    module: Any,
    deltas: Sequence[ExpertDelta],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Runs fused experts with adapters; gradients flow to hidden states, routing weights and adapters.

    Args:
        module: A family's experts; its parameters may be stored otherwise, as `ExpertWeights`.
        deltas: Adapters on them, each for all tokens or for some.
        hidden_states: ``[T, D]``.
        top_k_index: Chosen experts, ``[T, k]``; indices beyond the last expert contribute nothing.
        top_k_weights: ``[T, k]``.

    Returns:
        ``[T, D]``.
    """
    routing = Routing(top_k_index, module.num_experts)

    def product(name: str, rows: Tensor) -> Tensor:
        stored = getattr(module, name)
        if isinstance(stored, Tensor):
            rows = rows.to(stored.dtype)
        weights = _PlainWeights(stored.detach(), module.is_transposed) if isinstance(stored, Tensor) else stored
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        width = stored.shape[2 if module.is_transposed else 1]
        result: Tensor = _Products.apply(rows, weights, bias, width, routing.spans)  # type: ignore[no-untyped-call]
        for delta in deltas:
            if delta.parameter == name:
                result = delta.add(rows, result, routing)
        return result

    down = expert_mlp(module, hidden_states[routing.tokens], product)  # [T * k, D]
    return combine(module, down, top_k_weights, routing, hidden_states)


@dataclass(frozen=True)
class _PlainWeights:
    """`ExpertWeights` of a parameter as HF has it."""

    stacked: Tensor
    is_transposed: bool

    def product(self, expert: int, rows: Tensor) -> Tensor:
        return rows @ self.weight(expert, rows.dtype).T

    def weight(self, expert: int, dtype: torch.dtype) -> Tensor:
        return self.stacked[expert].T if self.is_transposed else self.stacked[expert]


class _Products(torch.autograd.Function):
    """Products of sorted rows with their experts' weights; the backward pass asks for the weights again.

    Rows of experts elsewhere give zeros, and so do their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: ExpertWeights, bias: Tensor | None, width: int, spans: Mapping[int, slice]
    ) -> Tensor:
        ctx.weights, ctx.width, ctx.spans = weights, rows.shape[1], spans
        result = rows.new_zeros(rows.shape[0], width)
        for expert, span in spans.items():
            result[span] = weights.product(expert, rows[span])
            if bias is not None:
                result[span].add_(bias[expert])
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows = grad.new_zeros(grad.shape[0], ctx.width)
        for expert, span in ctx.spans.items():
            torch.mm(grad[span], ctx.weights.weight(expert, grad.dtype), out=rows[span])
        return rows, None, None, None, None
