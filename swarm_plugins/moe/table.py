"""The experts implementation ``swarm_table``: tokens sorted by expert, one product per expert that has any.

Usable by every mixture of experts of transformers: ``experts_implementation="swarm_table"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from swarm_plugins.moe.dispatch import combine, expert_mlp
from swarm_plugins.moe.routing import Routing


def run_table(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Runs fused experts on the tokens that are routed to them.

    Args:
        module: A family's experts; the flags of transformers' experts registry are honoured.
        hidden_states: ``[T, D]``.
        top_k_index: Chosen experts, ``[T, k]``; indices beyond the last expert contribute nothing.
        top_k_weights: ``[T, k]``.

    Returns:
        ``[T, D]``.
    """
    routing = Routing(top_k_index, module.num_experts)
    spans = routing.spans()
    num_rows = max((span.stop for span in spans.values()), default=0)  # rows of experts elsewhere come last

    def product(name: str, rows: Tensor) -> Tensor:
        weight = getattr(module, name)
        if not module.is_transposed:
            weight = weight.transpose(1, 2)
        result: Tensor = _Products.apply(rows.to(weight.dtype), weight, spans)  # type: ignore[no-untyped-call]
        if module.has_bias:
            result = result + getattr(module, f"{name}_bias")[routing.experts[:num_rows]]
        return result

    down = expert_mlp(module, hidden_states[routing.tokens[:num_rows]], product)
    if num_rows < routing.tokens.shape[0]:
        down = torch.cat([down, down.new_zeros(routing.tokens.shape[0] - num_rows, down.shape[1])])
    return combine(module, down, top_k_weights, routing, hidden_states)


class _Products(torch.autograd.Function):
    """Multiplies each expert's rows by its weight; rows ``[N, in]``, weight ``[E, in, out]``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, spans: Mapping[int, slice]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.spans = spans
        result = rows.new_empty(rows.shape[0], weight.shape[2])
        for expert, span in spans.items():
            torch.mm(rows[span], weight[expert], out=result[span])
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        grad_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for expert, span in ctx.spans.items():
            if grad_rows is not None:
                torch.mm(grad[span], weight[expert].T, out=grad_rows[span])
            if grad_weight is not None:
                torch.mm(rows[span].T, grad[span], out=grad_weight[expert])
        return grad_rows, grad_weight, None
