"""Computes again what a server was asked, and compares: for a client's check, and for a third party's replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from swarm_plugins.block_io import AdapterUse, LoadedAdapter, SpanInputs
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    ForwardRequest,
    ForwardResponse,
)
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks
from swarm_plugins.verification.scores import (
    Verdict,
    coarsest,
    compare_gradients,
    compare_outputs,
    compare_parameters,
    is_conclusive,
)

if TYPE_CHECKING:
    from swarm_plugins.verification.openings import Opening


class Asked:
    """The inputs of a request, as the server got them.

    Args:
        request: The forward, or the one that a backward belongs to.
        adapters: The adapters that it names. Copied: those in training change in place.
        kind: How the server computes.
    """

    def __init__(self, request: ForwardRequest, adapters: Sequence[LoadedAdapter], kind: Kind) -> None:
        self.kind = kind
        self.adapters = tuple(one.map(lambda tensor: tensor.detach().to("cpu", copy=True)) for one in adapters)
        self.request = request
        wire = str(request.hidden.dtype).removeprefix("torch.")
        self.precision = coarsest([kind.precision, wire, request.reply_codec])

    def inputs(self, *, needs_grad: bool = False) -> SpanInputs:
        """Returns the inputs in the server's type, as leaves of a graph if asked."""
        request, dtype = self.request, self.kind.torch_dtype
        use = AdapterUse(adapters=self.adapters, rows=request.adapter_rows, dropout_seed=request.dropout_seed)
        inputs = SpanInputs(
            blocks=range(request.start, request.end),
            hidden=request.hidden.to(dtype),
            position_ids=request.position_ids,
            attention_mask=request.attention_mask,
            adapters=use,
            prefix=tuple(tensor.to(dtype) for tensor in request.prefix),
        )
        if not needs_grad:
            return inputs
        leaves = inputs.map(lambda tensor: _leaf(tensor) if tensor.is_floating_point() else tensor)
        return replace(leaves, adapters=use.map(_leaf))


async def recompute_forward(asked: Asked, response: ForwardResponse, blocks: LocalBlocks) -> list[Verdict]:
    """Compares a forward's answer, inner hidden states included, with the same blocks here.

    Raises:
        SwarmError: If the blocks cannot be read or run here.
    """
    inputs = asked.inputs()
    expected = await blocks.outputs(inputs, asked.kind)
    return forward_verdicts(asked, response, expected, is_mixture=blocks.has_experts(inputs.blocks, asked.kind))


def forward_verdicts(
    asked: Asked, response: ForwardResponse, expected: Sequence[Tensor], *, is_mixture: bool
) -> list[Verdict]:
    """Compares a forward's answer with the outputs of the last blocks, ``[B, S, D]`` each."""
    hidden, mask = asked.request.hidden, asked.request.attention_mask
    claimed = [*response.hidden_states, response.hidden]
    num_blocks = asked.request.end - asked.request.start
    if not is_conclusive(asked.precision, hidden.shape[0] * hidden.shape[1], is_mixture=is_mixture):
        return []
    return [
        compare_outputs(hidden, one, here, asked.precision, mask=mask, is_mixture=is_mixture, num_blocks=num_blocks)
        for one, here in zip(claimed, expected[-len(claimed) :], strict=True)
    ]


async def recompute_backward(
    asked: Asked, request: BackwardRequest, response: BackwardResponse, blocks: LocalBlocks
) -> list[Verdict]:
    """Compares a backward's answer with the gradients of the same blocks here.

    Raises:
        SwarmError: If the blocks cannot be read or run here.
    """
    if request.grad_hidden_states or request.grad_router_logits:
        return []
    inputs = asked.inputs(needs_grad=True)
    wanted = [
        *([inputs.hidden] if request.needs_hidden else []),
        *(inputs.adapters.tensors if request.needs_adapters else ()),
        *(inputs.prefix if request.needs_prefix else ()),
    ]
    if not wanted:
        return []
    expected = await blocks.gradients(inputs, asked.kind, request.grad_hidden, wanted)
    is_mixture = blocks.has_experts(inputs.blocks, asked.kind)
    return backward_verdicts(asked, request, response, expected, is_mixture=is_mixture)


def backward_verdicts(
    asked: Asked,
    request: BackwardRequest,
    response: BackwardResponse,
    expected: Sequence[Tensor],
    *,
    is_mixture: bool,
) -> list[Verdict]:
    """Compares a backward's answer with gradients: of the hidden states if asked for, then of adapters and prefix."""
    hidden = asked.request.hidden
    if not is_conclusive(asked.precision, hidden.shape[0] * hidden.shape[1], is_mixture=is_mixture):
        return []
    rest, verdicts = list(expected), []
    num_blocks = asked.request.end - asked.request.start
    if request.needs_hidden and response.grad_hidden is not None:
        mask, here = asked.request.attention_mask, rest.pop(0)
        verdicts.append(
            compare_gradients(
                response.grad_hidden, here, asked.precision, mask=mask, is_mixture=is_mixture, num_blocks=num_blocks
            )
        )
    if rest:
        found = (*response.grad_adapters, *response.grad_prefix)
        verdicts.append(compare_parameters(found, rest, asked.precision, num_blocks=num_blocks))
    return verdicts


async def recompute_opened(
    asked: Asked, response: ForwardResponse | BackwardResponse, opening: Opening, blocks: LocalBlocks
) -> list[Verdict]:
    """Compares what a server has opened of a forward or backward, block by block, with the same blocks here.

    Raises:
        SwarmError: If a block cannot be read or run here.
    """
    whole = asked.inputs()
    span, states = whole.blocks, opening.states
    last = len(span) - 1
    verdicts = []
    for block in opening.blocks:
        index = block - span.start
        hidden = states[index - 1] if index else whole.hidden
        # The answer has travelled; inner states are opened as the server has them.
        precision = asked.precision if index in (0, last) else asked.kind.precision
        one = whole.take_blocks(range(block, block + 1), hidden)
        if isinstance(response, ForwardResponse) or index < last:
            output = response.hidden if isinstance(response, ForwardResponse) and index == last else states[index]
            [expected] = await blocks.outputs(one, asked.kind)
            is_mixture = blocks.has_experts(one.blocks, asked.kind)
            tokens = output.shape[1]  # of a session, only the last ones were answered
            if not is_conclusive(precision, output.shape[0] * tokens, is_mixture=is_mixture):
                continue
            verdicts.append(
                compare_outputs(
                    hidden[:, -tokens:],
                    output,
                    expected[:, -tokens:],
                    precision,
                    mask=one.attention_mask,
                    is_mixture=is_mixture,
                )
            )
        if isinstance(response, BackwardResponse) and opening.request.grad is not None:
            grad = opening.request.grad if index == last else states[last + index]
            found = states[last + index - 1] if index else response.grad_hidden
            verdicts += await _opened_gradients(asked, one, grad, found, response, blocks)
    return verdicts


async def _opened_gradients(
    asked: Asked,
    inputs: SpanInputs,
    grad: Tensor,
    found: Tensor | None,
    response: BackwardResponse,
    blocks: LocalBlocks,
) -> list[Verdict]:
    """Compares the gradients of one block's input and of the adapters on it."""
    leaves = replace(inputs, hidden=_leaf(inputs.hidden), adapters=inputs.adapters.map(_leaf))
    on_block = [index for index, block in enumerate(_blocks_of(asked.adapters)) if block in inputs.blocks]
    if not response.grad_adapters:
        on_block = []
    wanted = [leaves.hidden, *(leaves.adapters.tensors[index] for index in on_block)]
    expected = await blocks.gradients(leaves, asked.kind, grad, wanted)
    verdicts = []
    if found is not None:
        is_mixture = blocks.has_experts(inputs.blocks, asked.kind)
        mask = inputs.attention_mask
        verdicts.append(compare_gradients(found, expected[0], asked.precision, mask=mask, is_mixture=is_mixture))
    if on_block:
        claimed = [response.grad_adapters[index] for index in on_block]
        verdicts.append(compare_parameters(claimed, expected[1:], asked.precision))
    return verdicts


def _blocks_of(adapters: Sequence[LoadedAdapter]) -> list[int]:
    """Returns the block of each tensor of each adapter, in order."""
    return [module.block for one in adapters for module in one.spec.modules for _ in module.shapes]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()
