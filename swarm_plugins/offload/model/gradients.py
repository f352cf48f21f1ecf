"""Gradients through experts that are not kept: they are borrowed again when the backward pass needs them.

Autograd would keep every weight that a product has used, and the buffer that it lies in holds another expert by then.
So the forward saves its input and who was routed where; the backward borrows each expert once more (those at hand
first, and the last layer's experts are still at hand), runs it again on its rows, and takes the gradients at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from swarm_plugins.moe import ExpertDelta, Routing
from swarm_plugins.offload.model.loans import ExpertLoans, LowRank

__all__ = ["adapters_of", "out_of_autocast", "run_with_gradients"]


def adapters_of(
    deltas: Sequence[ExpertDelta], tokens: Tensor, num_tokens: int, spans: Mapping[int, slice]
) -> Callable[[int], list[LowRank]]:
    """Returns a function that takes the adapters of one expert out of fused ones.

    Args:
        deltas: The fused ones.
        tokens: The token of each expert-sorted row, ``[T * k]``.
        num_tokens: ``T``.
        spans: The rows of each expert.
    """
    if not deltas:
        return _none
    factors = [(delta, *delta.factors(), delta.rows_of(tokens, num_tokens)) for delta in deltas]

    def adapters(expert: int) -> list[LowRank]:
        span = spans[expert]
        return [
            LowRank(
                delta.parameter,
                factor_a[expert],
                factor_b[:, :, expert],
                delta.scaling,
                None if applies is None else applies[span].nonzero().squeeze(1),
            )
            for delta, factor_a, factor_b, applies in factors
        ]

    return adapters


def _none(expert: int) -> list[LowRank]:
    return []


def out_of_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which products are formed in the weights' type, as in transformers' grouped implementation.

    Autocast does not reach that one, neither in the forward pass nor in a backward pass that is called inside it.
    """
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def run_with_gradients(
    loans: ExpertLoans, module: Any, hidden: Tensor, routing: Routing, deltas: Sequence[ExpertDelta]
) -> Tensor:
    """Runs all experts.

    Args:
        loans: Lends them.
        module: The family's experts.
        hidden: ``[T, D]``; gradients flow to it, and to the adapters.
        routing: Which token goes to which experts.
        deltas: Adapters.

    Returns:
        Expert-sorted results, ``[T * k, D]``.
    """
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
        ctx.spans = routing.spans()
        adapters = adapters_of(deltas, routing.tokens, routing.num_tokens, ctx.spans)
        return loans.run_all(module, hidden[routing.tokens], ctx.spans, adapters)

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
        adapters = adapters_of(ctx.deltas, routing.tokens, routing.num_tokens, ctx.spans)
        with out_of_autocast(hidden.device), closing(ctx.loans.borrow_again(list(ctx.spans))) as lent:
            for expert, tensors in lent:
                span = ctx.spans[expert]
                own = [
                    one._replace(factor_a=_leaf(one.factor_a), factor_b=_leaf(one.factor_b)) for one in adapters(expert)
                ]
                inputs = [_leaf(rows[span]), *(factor for one in own for factor in (one.factor_a, one.factor_b))]
                with torch.enable_grad():
                    result = ctx.loans.run(ctx.module, inputs[0], expert, tensors, own)
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
