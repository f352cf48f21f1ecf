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


def run_weighed(loans: ExpertLoans, module: Any, hidden: Tensor, routing: Routing, top_k_weights: Tensor) -> Tensor:
    """Runs experts without adapters on hidden states, ``[T, D]``, and returns their weighed sum for each token.

    As ``moe.table`` does, to the bit: the gradient of a routing weight is read off the input of the last product, so
    that results need not be kept.
    """
    result: Tensor = _Weighed.apply(loans, module, routing, hidden, top_k_weights)  # type: ignore[no-untyped-call]
    return result


class _Weighed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loans: ExpertLoans, module: Any, routing: Routing, hidden: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        scales = top_k_weights.reshape(-1, 1).index_select(0, routing.order)  # [T * k, 1]
        ctx.loans, ctx.module, ctx.routing = loans, module, routing
        ctx.save_for_backward(hidden, scales)
        results = loans.run_all(module, hidden, routing, ())
        return routing.sum_tokens(results * scales).to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, scales = ctx.saved_tensors
        routing: Routing = ctx.routing
        spans, tokens = routing.spans, routing.tokens
        grad_rows = hidden.new_zeros(tokens.shape[0], hidden.shape[1])  # [T * k, D]
        grad_scales = torch.zeros_like(scales)
        with out_of_autocast(hidden.device), closing(ctx.loans.borrow(list(spans), is_backward=True)) as lent:
            for expert, tensors in lent:
                span = spans[expert]
                rows, weigh = _leaf(hidden[tokens[span]]), _leaf(scales[span].to(hidden.dtype))
                with torch.enable_grad():
                    result = ctx.loans.run(ctx.module, rows, tensors, scales=weigh)
                source = grad[tokens[span]].to(result.dtype)
                grad_rows[span], grad_scales[span] = torch.autograd.grad(result, (rows, weigh), source)
        grad_weights = routing.unsort(grad_scales).view(-1, routing.num_chosen)
        return None, None, None, routing.sum_tokens(grad_rows), grad_weights


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
