"""Gradients through experts that are not kept: they are borrowed again when the backward pass needs them.

Autograd would keep every weight used in a product, in a buffer that holds another expert by then. So the forward saves
its input and the routing; the backward borrows each expert once more (those at hand first, and the last layer's are
still at hand), runs it again on its rows, and takes the gradients at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from swarm_plugins.moe import ExpertDelta, Routing
from swarm_plugins.moe.dispatch import out_of_autocast
from swarm_plugins.moe.low_rank import adapters_of
from swarm_plugins.offload.model.loans import ExpertLoans


def run_with_gradients(
    loans: ExpertLoans, module: Any, hidden: Tensor, routing: Routing, deltas: Sequence[ExpertDelta]
) -> Tensor:
    """Does the same as `ExpertLoans.run_all`; gradients flow to hidden states and adapters."""
    factors = [factor for delta in deltas for factor in (delta.factor_a, delta.factor_b)]
    result: Tensor = _Experts.apply(loans, module, routing, deltas, hidden, *factors)  # type: ignore[no-untyped-call]
    return result


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        loans: ExpertLoans,
        module: Any,
        routing: Routing,
        deltas: Sequence[ExpertDelta],
        hidden: Tensor,
        *factors: Tensor,
    ) -> Tensor:
        ctx.loans, ctx.module, ctx.routing, ctx.deltas = loans, module, routing, deltas
        ctx.save_for_backward(hidden, *factors)
        return loans.run_all(module, hidden, routing, deltas)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *factors = ctx.saved_tensors
        routing: Routing = ctx.routing
        grads = [torch.zeros_like(factor) for factor in factors]
        views = [
            view
            for delta, grad_a, grad_b in zip(ctx.deltas, grads[::2], grads[1::2], strict=True)
            for view in _views(delta, grad_a, grad_b)
        ]
        rows = hidden[routing.tokens]  # [T * k, D]
        grad_rows = torch.zeros_like(rows)
        spans = routing.spans
        adapters = adapters_of(ctx.deltas, routing.tokens, routing.num_tokens, spans)
        with out_of_autocast(hidden.device), closing(ctx.loans.borrow(list(spans), is_backward=True)) as lent:
            for expert, tensors in lent:
                span = spans[expert]
                own = [
                    one._replace(factor_a=_leaf(one.factor_a), factor_b=_leaf(one.factor_b)) for one in adapters(expert)
                ]
                inputs = [_leaf(rows[span]), *(factor for one in own for factor in (one.factor_a, one.factor_b))]
                with torch.enable_grad():
                    result = ctx.loans.run(ctx.module, inputs[0], tensors, own)
                found = torch.autograd.grad(result, inputs, grad[span])
                grad_rows[span] = found[0]
                for view, part in zip(views, found[1:], strict=True):
                    view[expert] = part
        grad_hidden = routing.unsort(grad_rows).reshape(hidden.shape[0], -1, hidden.shape[1]).sum(dim=1)  # [T, D]
        return None, None, None, None, grad_hidden, *grads


def _views(delta: ExpertDelta, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the factors' gradients with the expert first: ``[E, rank, in]`` and ``[E, out, rank]``."""
    view_a = grad_a.view(delta.num_experts, -1, grad_a.shape[1])
    return view_a, grad_b.view(grad_b.shape[0], -1, delta.num_experts).permute(2, 0, 1)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()
