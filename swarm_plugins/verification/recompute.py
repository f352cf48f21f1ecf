"""Computes again what a server was asked, and compares: for a client's check, and for a third party's replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
)


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
        self.precision = coarsest([kind.dtype, wire, request.reply_codec])

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
    claimed = [*response.hidden_states, response.hidden]
    is_mixture = blocks.has_experts(inputs.blocks, asked.kind)
    return [
        compare_outputs(inputs.hidden, one, here, asked.precision, mask=inputs.attention_mask, is_mixture=is_mixture)
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
    verdicts = []
    if request.needs_hidden and response.grad_hidden is not None:
        is_mixture = blocks.has_experts(inputs.blocks, asked.kind)
        mask, here = inputs.attention_mask, expected.pop(0)
        verdicts.append(
            compare_gradients(response.grad_hidden, here, asked.precision, mask=mask, is_mixture=is_mixture)
        )
    if expected:
        found = (*response.grad_adapters, *response.grad_prefix)
        verdicts.append(compare_parameters(found, expected, asked.precision))
    return verdicts


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()
