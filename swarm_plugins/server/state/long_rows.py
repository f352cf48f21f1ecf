"""Rows too long to run at once: block after block, and in each block some tokens at a time, forward and backward.

A part of a row sees the tokens before it as keys and values, as the parts of a long prompt do in a session. Backward,
the last part comes first: each part is computed again with a graph, and hands the gradients of the keys and values
that it has seen to the parts that made them. It takes the memory of one part's graph in one block, the hidden states
between the blocks, and all keys and values. Both passes are generators, which yield after each part of each block.

Shapes: ``B`` rows, ``S`` new tokens, ``P`` prefix, ``D`` width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from swarm_plugins.block_io import SpanInputs, SpanOutputs, join_outputs
from swarm_plugins.blocks.runner import SpanRunner
from swarm_plugins.server.state.gradients import add_gradients, backward


class LongRows:
    """A forward of long rows, and its backward; ``gradients`` holds those of adapters by the identity of the leaf.

    Args:
        runner: The span.
        inputs: The rows; where they, their adapters or prefix require gradients, `backward` finds them.
        part_tokens: Tokens of each row that run at a time.
    """

    def __init__(self, runner: SpanRunner, inputs: SpanInputs, part_tokens: int) -> None:
        self.gradients: dict[int, Tensor] = {}
        self.prefix_gradients: dict[int, tuple[Tensor, Tensor]] = {}
        """By block, ``[B, H, P, W]``."""
        self._runner = runner
        self._inputs = inputs
        # A server that moves may drop the span between two parts.
        self._layouts = {block: runner.spec.kv_layouts[block] for block in inputs.blocks}
        length = inputs.hidden.shape[1]
        self._before = inputs.prefix[0].shape[2] if inputs.prefix else 0
        self._parts = [(start, min(start + part_tokens, length)) for start in range(0, length, part_tokens)]
        self._past: dict[int, tuple[Tensor, Tensor]] = {}
        self._states: list[Tensor] = []

    def forward(self) -> Generator[None, None, SpanOutputs]:
        """Runs all blocks, without a graph."""
        found: list[SpanOutputs] = []
        hidden = self._inputs.hidden.detach()
        for block in self._inputs.blocks:
            self._states.append(hidden)
            self._past[block] = self._empty_past(block)
            parts: list[SpanOutputs] = []
            for start, end in self._parts:
                parts.append(self._forward_part(block, hidden, start, end))
                yield
            found.append(join_outputs(parts, dim=1))
            hidden = found[-1].hidden
        return SpanOutputs(
            hidden=hidden,
            hidden_states=tuple(one.hidden for one in found[:-1]) if self._inputs.collect_hidden else (),
            router_logits=tuple(logits for one in found for logits in one.router_logits),
            router_blocks=tuple(block for one in found for block in one.router_blocks),
        )

    def backward(self, grads: SpanOutputs, router_blocks: Sequence[int]) -> Generator[None, None, Tensor]:
        """Returns the gradient of the first block's input; `forward` has run."""
        routers = dict(zip(router_blocks, grads.router_logits, strict=bool(grads.router_logits)))
        blocks = self._inputs.blocks
        grad = grads.hidden
        for index in reversed(range(len(blocks))):
            grad = yield from self._backward_block(blocks[index], self._states.pop(), grad, routers.get(blocks[index]))
            if index and grads.hidden_states:
                grad = grad + grads.hidden_states[index - 1].to(grad.dtype)
        return grad

    def _empty_past(self, block: int) -> tuple[Tensor, Tensor]:
        """Returns room for all keys and values of a block, with the prefix in it."""
        spec, hidden = self._runner.spec, self._inputs.hidden
        layout = self._layouts[block]
        total = self._before + hidden.shape[1]
        keys = torch.empty(hidden.shape[0], layout.key_heads, total, layout.key_width, dtype=layout.dtype)
        values = torch.empty(hidden.shape[0], layout.value_heads, total, layout.value_width, dtype=layout.dtype)
        past = keys.to(spec.device), values.to(spec.device)
        if self._before:
            index = 2 * (block - self._inputs.blocks.start)
            for whole, given in zip(past, self._inputs.prefix[index : index + 2], strict=True):
                whole[:, :, : self._before] = given.detach()
        return past

    def _forward_part(self, block: int, hidden: Tensor, start: int, end: int) -> SpanOutputs:
        past = self._past[block]
        seen = [whole[:, :, : self._before + start] for whole in past]
        with torch.no_grad():
            outputs, made = self._runner.forward_part(self._part(block, hidden, start, end, seen))
            for whole, new in zip(past, made, strict=True):
                whole[:, :, self._before + start : self._before + end] = new
        return outputs

    def _part(self, block: int, hidden: Tensor, start: int, end: int, past: Sequence[Tensor]) -> SpanInputs:
        inputs = self._inputs.take_blocks(range(block, block + 1), hidden).take_tokens(start, end)
        return dataclasses.replace(inputs, prefix=tuple(past), collect_hidden=False)

    def _backward_block(
        self, block: int, hidden: Tensor, grad: Tensor, grad_router: Tensor | None
    ) -> Generator[None, None, Tensor]:
        past = self._past.pop(block)
        # In float32: a key collects the gradients of all later parts.
        collected = [torch.zeros_like(whole, dtype=torch.float32) for whole in past]
        grad_in = torch.zeros_like(hidden)
        routers = None if grad_router is None else grad_router.unflatten(0, hidden.shape[:2])  # [B, S, E]
        for start, end in reversed(self._parts):
            seen = [whole[:, :, : self._before + start].detach().requires_grad_() for whole in past]
            inputs = self._part(block, hidden, start, end, seen)
            inputs = dataclasses.replace(
                inputs,
                hidden=inputs.hidden.detach().requires_grad_(),
                collect_router=routers is not None,
            )
            with torch.enable_grad():
                outputs, made = self._runner.forward_part(inputs)
            own = [whole[:, :, self._before + start : self._before + end] for whole in collected]
            pairs = [(outputs.hidden, grad[:, start:end]), *zip(made, own, strict=True)]
            if routers is not None:
                pairs.extend((logits, routers[:, start:end].flatten(0, 1)) for logits in outputs.router_logits)
            leaves = [leaf for leaf in inputs.adapters.tensors if leaf.requires_grad]
            found = backward(pairs, [inputs.hidden, *seen, *leaves])
            if found[0] is not None:
                grad_in[:, start:end] = found[0]
            for whole, more in zip(collected, found[1:3], strict=True):
                if more is not None:
                    whole[:, :, : self._before + start] += more
            add_gradients(self.gradients, leaves, found[3:])
            yield
        if self._before:
            keys, values = (whole[:, :, : self._before] for whole in collected)
            self.prefix_gradients[block] = (keys.to(past[0].dtype), values.to(past[1].dtype))
        return grad_in
