"""One forward without a session and its gradients, on the compute thread.

Shapes: ``B`` batch, ``S`` tokens, ``D`` width, ``P`` prefix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_plugins.block_io import SpanInputs, SpanOutputs
from swarm_plugins.blocks.runner import SpanRunner
from swarm_plugins.server.failures import BadRequestError
from swarm_plugins.server.state.activations import GraphMeter
from swarm_plugins.server.state.blockwise import Blockwise

__all__ = ["Gradients", "KeptForward", "forward_keeping", "forward_only", "gradients"]


@dataclass(frozen=True, kw_only=True)
class KeptForward:
    """A forward whose graph is alive: its inputs (leaves of the graph) and outputs."""

    inputs: SpanInputs
    outputs: SpanOutputs


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Gradients of a forward's inputs, those that were asked for."""

    hidden: Tensor | None = None
    """``[B, S, D]``."""
    adapters: tuple[Tensor, ...] = ()
    """Of all tensors of all adapters, in order."""
    prefix: tuple[Tensor, ...] = ()


def _nothing() -> None:
    pass


def forward_only(runner: SpanRunner, inputs: SpanInputs) -> SpanOutputs:
    """Runs a forward that no backward will follow."""
    with torch.no_grad():
        return runner.forward(inputs)


def forward_keeping(
    runner: SpanRunner, inputs: SpanInputs, *, limit_bytes: int, weights: Collection[int]
) -> tuple[SpanOutputs, KeptForward | None, int]:
    """Runs a forward and keeps its graph.

    Args:
        runner: The span.
        inputs: What it gets.
        limit_bytes: The graph is given up above this.
        weights: Addresses of the span's own storages, which do not count.

    Returns:
        The outputs without graph, the kept forward (None if it is too large) and the bytes it holds.
    """
    meter = GraphMeter(limit_bytes, weights)
    leaves = _as_leaves(inputs, hidden=True, adapters=True, prefix=True)
    with torch.enable_grad(), meter.recording():
        outputs = runner.forward(leaves)
    meter.count((leaves.hidden, *leaves.prefix, *outputs.tensors))
    kept = None if meter.is_over else KeptForward(inputs=leaves, outputs=outputs)
    return outputs.map(Tensor.detach), kept, meter.num_bytes


def gradients(
    runner: SpanRunner,
    kept: KeptForward | SpanInputs,
    *,
    grad_hidden: Tensor,
    grad_hidden_states: Sequence[Tensor] = (),
    grad_router_logits: Sequence[Tensor] = (),
    needs_hidden: bool = True,
    needs_adapters: bool = False,
    needs_prefix: bool = False,
    limit_bytes: int = 1 << 62,
    weights: Collection[int] = (),
    between: Callable[[], None] = _nothing,
) -> Gradients:
    """Returns the gradients of a kept forward, or of one that is run (again) for it.

    Args:
        runner: The span.
        kept: The forward, or what it gets.
        grad_hidden: Gradient of the last output, ``[B, S, D]``.
        grad_hidden_states: Of the inner outputs, or none.
        grad_router_logits: Of the router logits, or none.
        needs_hidden: Whether the gradient of the hidden states is wanted.
        needs_adapters: Those of the adapters.
        needs_prefix: Those of the prefix.
        limit_bytes: A graph made here that is larger gives way to one for each block.
        weights: Addresses of the span's own storages, which do not count.
        between: Called between two blocks of such a pass.

    Raises:
        RequestError: ``bad_request`` if the gradients given do not fit the outputs.
        CapacityError: If the graph of a single block is larger than ``limit_bytes``.
    """
    if isinstance(kept, SpanInputs):
        inputs = _as_leaves(kept, hidden=needs_hidden, adapters=needs_adapters, prefix=needs_prefix)
        meter = GraphMeter(limit_bytes, weights)
        with torch.enable_grad(), meter.recording():
            # With what is between the blocks: it is where a pass block by block starts.
            outputs = runner.forward(dataclasses.replace(inputs, collect_hidden=True))
        if not kept.collect_hidden and grad_hidden_states:
            raise _uneven("grad_hidden_states", len(grad_hidden_states), 0)
        if meter.is_over:
            outputs = outputs.map(Tensor.detach)
            _paired(outputs, grad_hidden, grad_hidden_states, grad_router_logits)
            blockwise = Blockwise(
                runner=runner, inputs=inputs, limit_bytes=limit_bytes, weights=weights, between=between
            )
            grad = blockwise.run(outputs, grad_hidden, grad_hidden_states, grad_router_logits)
            leaves = _wanted(inputs, hidden=False, adapters=needs_adapters, prefix=needs_prefix)
            rest = [blockwise.gradients.get(id(leaf), torch.zeros_like(leaf)) for leaf in leaves]
            return _sorted([grad, *rest] if needs_hidden else rest, inputs, needs_hidden, needs_prefix)
        kept = KeptForward(inputs=inputs, outputs=outputs)
    live, grads = _paired(kept.outputs, grad_hidden, grad_hidden_states, grad_router_logits)
    wanted = _wanted(kept.inputs, hidden=needs_hidden, adapters=needs_adapters, prefix=needs_prefix)
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if live and wanted:
        found = torch.autograd.grad(live, wanted, grads, allow_unused=True)
    results = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(wanted, found, strict=True)]
    return _sorted(results, kept.inputs, needs_hidden, needs_prefix)


def _sorted(results: Sequence[Tensor], inputs: SpanInputs, needs_hidden: bool, needs_prefix: bool) -> Gradients:
    num_prefix = len(inputs.prefix) if needs_prefix else 0
    return Gradients(
        hidden=results[0] if needs_hidden else None,
        adapters=tuple(results[int(needs_hidden) : len(results) - num_prefix]),
        prefix=tuple(results[len(results) - num_prefix :]),
    )


def _paired(
    outputs: SpanOutputs, hidden: Tensor, hidden_states: Sequence[Tensor], router_logits: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the outputs that have a gradient, and these gradients in the same order."""
    pairs = [(outputs.hidden, hidden)]
    for name, made, given in (
        ("grad_hidden_states", outputs.hidden_states, hidden_states),
        ("grad_router_logits", outputs.router_logits, router_logits),
    ):
        if given and len(given) != len(made):
            raise _uneven(name, len(given), len(made))
        pairs.extend(zip(made, given, strict=False))
    for output, grad in pairs:
        if output.shape != grad.shape:
            raise BadRequestError(f"a gradient has shape {list(grad.shape)}, its output has {list(output.shape)}")
    live = [(output, grad.to(output.dtype)) for output, grad in pairs if output.requires_grad]
    return [output for output, _ in live], [grad for _, grad in live]


def _uneven(name: str, given: int, made: int) -> BadRequestError:
    return BadRequestError(f"{name} has {given} tensors, the forward had {made}: give one each, or none")


def _wanted(inputs: SpanInputs, *, hidden: bool, adapters: bool, prefix: bool) -> list[Tensor]:
    wanted = [inputs.hidden] if hidden else []
    if adapters:
        wanted.extend(inputs.adapters.tensors)
    if prefix:
        wanted.extend(inputs.prefix)
    return wanted


def _as_leaves(inputs: SpanInputs, *, hidden: bool, adapters: bool, prefix: bool) -> SpanInputs:
    """Returns the inputs with fresh leaves of a graph in the places asked for."""
    return dataclasses.replace(
        inputs,
        hidden=_leaf(inputs.hidden) if hidden else inputs.hidden,
        adapters=inputs.adapters.map(_leaf) if adapters else inputs.adapters,
        prefix=tuple(_leaf(tensor) for tensor in inputs.prefix) if prefix else inputs.prefix,
    )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()
