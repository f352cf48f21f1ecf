"""Connects PyTorch's autograd to the swarm: one function whose forward and backward run on servers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from swarm_plugins.block_io import SpanOutputs
from swarm_plugins.transport.codec import has_non_finite

if TYPE_CHECKING:
    from swarm_plugins.client.training.batch import BatchCall
    from swarm_plugins.transport.loop import LoopThread


def run_batch(loop: LoopThread, call: BatchCall) -> SpanOutputs:
    """Runs a call; if it keeps what a backward needs, differentiable in hidden states, adapters and prefix."""
    if not call.keep:
        return loop.run(call.forward())
    layout: list[SpanOutputs] = []
    flat: tuple[Tensor, ...] = _BatchFunction.apply(  # type: ignore[no-untyped-call]
        loop, call, layout, *call.inputs.differentiable
    )
    return layout[0].with_tensors(flat)


class _BatchFunction(torch.autograd.Function):
    """Forward and backward of a batch. Outputs: hidden, inner hidden states, router logits."""

    @staticmethod
    def forward(
        ctx: Any, loop: LoopThread, call: BatchCall, layout: list[SpanOutputs], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = loop.run(call.forward())
        # Tells `run_batch` how many tensors of each kind the flat result holds.
        layout.append(outputs)
        ctx.call, ctx.loop, ctx.may_overflow = call, loop, is_scaled()
        # Emptied: autograd keeps the tensors for as long as they are needed.
        ctx.layout = outputs.map(lambda tensor: tensor.new_empty(0))
        # Saved so that autograd raises if a tensor is changed in place before the backward.
        ctx.save_for_backward(*tensors)
        # Detached: if these were the tensors that the call keeps, they and this node would form a cycle
        # that Python's collector cannot see through, and would never be freed.
        return outputs.map(Tensor.detach).tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *tensors = ctx.saved_tensors
        needs_hidden, *needs = ctx.needs_input_grad[3:]
        if ctx.may_overflow and any(map(has_non_finite, grads)):
            # Servers refuse such gradients. A loss scaler skips the step when it sees NaN, and lowers its scale.
            pairs = zip((hidden, *tensors), (needs_hidden, *needs), strict=True)
            return (None, None, None, *(torch.full_like(one, math.nan) if need else None for one, need in pairs))
        backward = ctx.call.backward(ctx.layout.with_tensors(grads), needs_hidden=needs_hidden, needs=needs)
        grad_hidden, *gradients = ctx.loop.run(backward)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            # Frees the hidden states between spans together with the saved tensors: users may keep the loss. No public
            # function of torch tells whether the graph is kept.
            ctx.call = None
        # Adapters may live on an accelerator; gradients arrive in ordinary memory.
        wanted = [
            gradient.to(tensor.device) if need and gradient is not None else None
            for gradient, need, tensor in zip(gradients, needs, tensors, strict=True)
        ]
        return (None, None, None, grad_hidden, *wanted)


def is_scaled() -> bool:
    """Returns whether autocast uses float16, where losses are scaled up until gradients overflow."""
    kinds = ("cpu", "cuda")
    return any(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16 for kind in kinds)
