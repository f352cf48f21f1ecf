"""The place where PyTorch's autograd meets the swarm: one function whose forward and backward run elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from swarm_plugins.client.chain_call import BlockInputs, BlockOutputs, ChainCall
from swarm_plugins.client.loop import LoopThread

__all__ = ["run_blocks"]

NewCall = Callable[..., ChainCall]


def run_blocks(loop: LoopThread, new_call: NewCall, inputs: BlockInputs, blocks: range) -> BlockOutputs:
    """Runs blocks on the swarm; differentiable to hidden states, adapter tensors and prefix.

    Args:
        loop: Runs the network code.
        new_call: Makes the call: ``new_call(inputs, keep=...)``.
        inputs: What the blocks get.
        blocks: Which blocks.
    """
    tensors = (*inputs.adapters.tensors, *inputs.prefix)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (inputs.hidden, *tensors))):
        return loop.run(new_call(inputs, keep=False).forward(blocks))
    layout = BlockOutputs(hidden=inputs.hidden)
    flat: tuple[Tensor, ...] = _RemoteBlocks.apply(  # type: ignore[no-untyped-call]
        loop, new_call, inputs, blocks, layout, inputs.hidden, *tensors
    )
    num_hidden = len(layout.hidden_states)
    return BlockOutputs(
        hidden=flat[0],
        hidden_states=list(flat[1 : 1 + num_hidden]),
        router_logits=list(flat[1 + num_hidden :]),
        router_blocks=layout.router_blocks,
    )


class _RemoteBlocks(torch.autograd.Function):
    """Forward and backward of a chain. Outputs: hidden, inner hidden states, router logits."""

    @staticmethod
    def forward(
        ctx: Any,
        loop: LoopThread,
        new_call: NewCall,
        inputs: BlockInputs,
        blocks: range,
        layout: BlockOutputs,
        hidden: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        call = new_call(inputs, keep=True)
        outputs = loop.run(call.forward(blocks))
        # The caller learns from `layout` how many tensors of each kind the flat answer holds.
        layout.hidden_states = outputs.hidden_states
        layout.router_blocks = outputs.router_blocks
        ctx.call, ctx.loop, ctx.layout = call, loop, layout
        # Saved so that autograd raises when a tensor is changed in place between forward and backward.
        ctx.save_for_backward(hidden, *tensors)
        return (outputs.hidden, *outputs.hidden_states, *outputs.router_logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, *tensors = ctx.saved_tensors
        num_hidden = len(ctx.layout.hidden_states)
        by_kind = BlockOutputs(
            hidden=grads[0],
            hidden_states=list(grads[1 : 1 + num_hidden]),
            router_logits=list(grads[1 + num_hidden :]),
            router_blocks=ctx.layout.router_blocks,
        )
        needs_hidden, *needs = ctx.needs_input_grad[5:]
        gradients = ctx.loop.run(ctx.call.backward(by_kind, needs_hidden=needs_hidden, needs=needs))
        # Adapters may live on an accelerator; what comes over the wire is in ordinary memory.
        wanted = [
            gradient.to(tensor.device) if need and gradient is not None else None
            for gradient, need, tensor in zip(gradients[1:], needs, tensors, strict=True)
        ]
        return (None, None, None, None, None, gradients[0], *wanted)
