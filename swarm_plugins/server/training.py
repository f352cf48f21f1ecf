"""One forward without a session and its gradients, on the compute thread.

Shapes: ``B`` batch, ``S`` tokens, ``D`` width, ``P`` prefix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_plugins.blocks.types import AdapterUse, SpanInputs, SpanOutputs, SpanRunner
from swarm_plugins.server.activations import GraphMeter
from swarm_plugins.server.failures import RequestError

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
    meter.count((leaves.hidden, *leaves.prefix, outputs.hidden, *outputs.hidden_states, *outputs.router_logits))
    kept = None if meter.is_over else KeptForward(inputs=leaves, outputs=outputs)
    return _detached(outputs), kept, meter.num_bytes


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
) -> Gradients:
    """Returns the gradients of a kept forward, or of one that is run (again) for it.

    Raises:
        RequestError: ``bad_request`` if the gradients given do not fit the outputs.
    """
    if isinstance(kept, SpanInputs):
        inputs = _as_leaves(kept, hidden=needs_hidden, adapters=needs_adapters, prefix=needs_prefix)
        with torch.enable_grad():
            kept = KeptForward(inputs=inputs, outputs=runner.forward(inputs))
    outputs, grads = _paired(kept.outputs, grad_hidden, grad_hidden_states, grad_router_logits)
    wanted = _wanted(kept.inputs, hidden=needs_hidden, adapters=needs_adapters, prefix=needs_prefix)
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if outputs and wanted:
        found = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
    results = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(wanted, found, strict=True)]
    num_prefix = len(kept.inputs.prefix) if needs_prefix else 0
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
            raise RequestError(
                "bad_request", f"{name} has {len(given)} tensors, the forward had {len(made)}: give one each, or none"
            )
        pairs.extend(zip(made, given, strict=False))
    for output, grad in pairs:
        if output.shape != grad.shape:
            raise RequestError(
                "bad_request", f"a gradient has shape {list(grad.shape)}, its output has {list(output.shape)}"
            )
    live = [(output, grad.to(output.dtype)) for output, grad in pairs if output.requires_grad]
    return [output for output, _ in live], [grad for _, grad in live]


def _wanted(inputs: SpanInputs, *, hidden: bool, adapters: bool, prefix: bool) -> list[Tensor]:
    wanted = [inputs.hidden] if hidden else []
    if adapters:
        wanted.extend(tensor for adapter in inputs.adapters.adapters for tensor in adapter.tensors)
    if prefix:
        wanted.extend(inputs.prefix)
    return wanted


def _as_leaves(inputs: SpanInputs, *, hidden: bool, adapters: bool, prefix: bool) -> SpanInputs:
    """Returns the inputs with fresh leaves of a graph in the places asked for."""
    use = inputs.adapters
    if adapters and use.adapters:
        use = AdapterUse(
            adapters=tuple(
                dataclasses.replace(adapter, tensors=tuple(_leaf(tensor) for tensor in adapter.tensors))
                for adapter in use.adapters
            ),
            rows=use.rows,
            dropout_seed=use.dropout_seed,
        )
    return dataclasses.replace(
        inputs,
        hidden=_leaf(inputs.hidden) if hidden else inputs.hidden,
        adapters=use,
        prefix=tuple(_leaf(tensor) for tensor in inputs.prefix) if prefix else inputs.prefix,
    )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _detached(outputs: SpanOutputs) -> SpanOutputs:
    return SpanOutputs(
        hidden=outputs.hidden.detach(),
        hidden_states=tuple(tensor.detach() for tensor in outputs.hidden_states),
        router_logits=tuple(tensor.detach() for tensor in outputs.router_logits),
        router_blocks=outputs.router_blocks,
    )
