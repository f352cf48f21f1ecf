"""Gradients block by block, for a forward whose graph is larger than memory allows at once.

The inputs of all blocks are computed without a graph; then each block, from the last to the first, runs again with
one. So the memory is that of one block's graph, for one more forward (Chen et al. 2016, "Training deep nets with
sublinear memory cost", section 3).

Shapes: ``B`` batch, ``S`` tokens, ``D`` width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarm_plugins.block_io import SpanInputs, SpanOutputs
from swarm_plugins.blocks.runner import SpanRunner
from swarm_plugins.errors import CapacityError
from swarm_plugins.server.state.activations import GraphMeter

__all__ = ["Blockwise"]


@dataclass(kw_only=True)
class Blockwise:
    """One backward pass through a span.

    Raises:
        CapacityError: If the graph of a single block takes more than ``limit_bytes``.
    """

    runner: SpanRunner
    inputs: SpanInputs
    """What the blocks get: leaves of no graph, or those whose gradients are wanted."""
    limit_bytes: int
    weights: Collection[int]
    """Addresses of the span's own storages, which do not count."""
    between: Callable[[], None]
    """Called between blocks."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """What has been found, by the identity of the leaf."""

    def run(
        self, outputs: SpanOutputs, grad_hidden: Tensor, grad_states: Sequence[Tensor], grad_routers: Sequence[Tensor]
    ) -> Tensor:
        """Fills ``gradients``; returns the gradient of the hidden states that come in, ``[B, S, D]``.

        Args:
            outputs: Of the forward without a graph, with the hidden states between the blocks.
            grad_hidden: Gradient of the last block's output.
            grad_states: Of the outputs of all other blocks, or none.
            grad_routers: Of the router logits, or none.
        """
        blocks = self.inputs.blocks
        states = (self.inputs.hidden.detach(), *outputs.hidden_states)
        routers = dict(zip(outputs.router_blocks, grad_routers, strict=bool(grad_routers)))
        grad = grad_hidden
        for index in reversed(range(len(blocks))):
            grad = self._through(index, states[index], grad, routers.get(blocks[index]))
            if index and grad_states:
                grad = grad + grad_states[index - 1].to(grad.dtype)
            if index:
                self.between()
        return grad

    def _through(self, index: int, hidden: Tensor, grad: Tensor, grad_router: Tensor | None) -> Tensor:
        block = self.inputs.blocks[index]
        inputs = dataclasses.replace(
            self.inputs,
            blocks=range(block, block + 1),
            hidden=hidden.detach().requires_grad_(),
            prefix=self.inputs.prefix[2 * index : 2 * index + 2],
            collect_hidden=False,
            collect_router=grad_router is not None,
        )
        meter = GraphMeter(self.limit_bytes, self.weights)
        with torch.enable_grad(), meter.recording():
            outputs = self.runner.forward(inputs)
        if meter.is_over:
            raise CapacityError(
                f"the graph of block {block} takes more than {self.limit_bytes} bytes for a batch of "
                f"{list(hidden.shape[:2])} tokens: send fewer rows at once, or use a server that allows more"
            )
        pairs = [(outputs.hidden, grad)]
        if grad_router is not None:
            pairs.extend((logits, grad_router) for logits in outputs.router_logits)
        live = [(made, given.to(made.dtype)) for made, given in pairs if made.requires_grad]
        leaves = [leaf for leaf in (*inputs.adapters.tensors, *inputs.prefix) if leaf.requires_grad]
        wanted = [inputs.hidden, *leaves]
        found = torch.autograd.grad([made for made, _ in live], wanted, [given for _, given in live], allow_unused=True)
        for leaf, gradient in zip(leaves, found[1:], strict=True):
            if gradient is not None:
                known = self.gradients.get(id(leaf))
                self.gradients[id(leaf)] = gradient if known is None else known + gradient
        return torch.zeros_like(hidden) if found[0] is None else found[0]
