"""Forwards without a session and their gradients, on the compute thread.

A graph larger than memory allows is not made at once: the inputs of all blocks are computed without one, then each
block, from the last to the first, runs again with a graph of its own. It takes the memory of one block's graph, and one
more forward (Chen et al. 2016, "Training deep nets with sublinear memory cost", section 3). Blocks that only run
together (see `swarm_plugins.borders`) share a graph.

Shapes: ``B`` batch, ``S`` tokens, ``D`` width, ``P`` prefix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from swarm_plugins.block_io import SpanInputs, SpanOutputs
from swarm_plugins.blocks.runner import SpanRunner
from swarm_plugins.borders import pieces
from swarm_plugins.errors import CapacityError
from swarm_plugins.server.failures import BadRequestError
from swarm_plugins.server.state.activations import GraphMeter


@dataclass(frozen=True, kw_only=True)
class KeptForward:
    """A forward whose graph is alive: its inputs (leaves of the graph) and outputs."""

    inputs: SpanInputs
    outputs: SpanOutputs
    version: str = ""
    """Model version that its client asked for."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Gradients of a forward's inputs, as far as requested."""

    hidden: Tensor | None = None
    """``[B, S, D]``."""
    adapters: tuple[Tensor, ...] = ()
    """Of all tensors of all adapters, in order."""
    prefix: tuple[Tensor, ...] = ()


class Needs(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool = True
    adapters: bool = False
    prefix: bool = False


def forward_only(runner: SpanRunner, inputs: SpanInputs) -> SpanOutputs:
    """Runs a forward without a graph."""
    with torch.no_grad():
        return runner.forward(inputs)


def forward_keeping(
    runner: SpanRunner, inputs: SpanInputs, *, limit_bytes: int, weights: Collection[int]
) -> tuple[SpanOutputs, KeptForward | None, int]:
    """Returns outputs without graph, the forward with its graph (None if too large) and the bytes it holds."""
    meter = GraphMeter(limit_bytes, weights)
    leaves = as_leaves(inputs, Needs(adapters=True, prefix=True))
    with torch.enable_grad(), meter.recording():
        outputs = runner.forward(leaves)
    meter.count((leaves.hidden, *leaves.prefix, *outputs.tensors))
    kept = None if meter.is_over else KeptForward(inputs=leaves, outputs=outputs)
    return outputs.map(Tensor.detach), kept, meter.num_bytes


def gradients(
    runner: SpanRunner,
    kept: KeptForward | SpanInputs,
    grads: SpanOutputs,
    needs: Needs,
    *,
    limit_bytes: int = 1 << 62,
    weights: Collection[int] = (),
    between: Callable[[], None] = lambda: None,
) -> Gradients:
    """Returns the gradients of a kept forward, or of one that is run (again) for it.

    ``grads`` are the gradients of the outputs; its ``hidden_states`` and ``router_logits`` may be empty. A graph larger
    than ``limit_bytes``, without the span's own storages at the addresses ``weights``, is replaced by one for each
    block, or for blocks that only run together; ``between`` is then called between two of them.

    Raises:
        RequestError: ``bad_request`` if ``grads`` do not fit the outputs.
        CapacityError: If one of these is larger than ``limit_bytes``, too.
    """
    if isinstance(kept, SpanInputs):
        inputs = as_leaves(kept, needs)
        meter = GraphMeter(limit_bytes, weights)
        with torch.enable_grad(), meter.recording():
            # With the states between the blocks, where a pass block by block starts.
            outputs = runner.forward(dataclasses.replace(inputs, collect_hidden=True))
        if not kept.collect_hidden and grads.hidden_states:
            raise _uneven("grad_hidden_states", len(grads.hidden_states), 0)
        if meter.is_over:
            outputs = outputs.map(Tensor.detach)
            paired(outputs, grads)
            blockwise = _Blockwise(runner, inputs, limit_bytes, weights)
            grad = blockwise.run(outputs, grads, between)
            leaves = _wanted(inputs, needs._replace(hidden=False))
            rest = [blockwise.gradients.get(id(leaf), torch.zeros_like(leaf)) for leaf in leaves]
            return _sorted([grad, *rest] if needs.hidden else rest, inputs, needs)
        kept = KeptForward(inputs=inputs, outputs=outputs)
    wanted = _wanted(kept.inputs, needs)
    found = backward(paired(kept.outputs, grads), wanted)
    results = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(wanted, found, strict=True)]
    return _sorted(results, kept.inputs, needs)


def backward(pairs: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Returns the gradients of the wanted leaves, from outputs and their gradients; None: it does not depend on one."""
    live = [(output, grad.to(output.dtype)) for output, grad in pairs if output.requires_grad]
    if not live or not wanted:
        return [None] * len(wanted)
    outputs, grads = zip(*live, strict=True)
    return torch.autograd.grad(outputs, wanted, grads, allow_unused=True)


def _sorted(results: Sequence[Tensor], inputs: SpanInputs, needs: Needs) -> Gradients:
    num_prefix = len(inputs.prefix) if needs.prefix else 0
    return Gradients(
        hidden=results[0] if needs.hidden else None,
        adapters=tuple(results[int(needs.hidden) : len(results) - num_prefix]),
        prefix=tuple(results[len(results) - num_prefix :]),
    )


def add_gradients(sums: dict[int, Tensor], leaves: Sequence[Tensor], found: Sequence[Tensor | None]) -> None:
    """Adds gradients to the sums of earlier ones, by the identity of the leaf."""
    for leaf, gradient in zip(leaves, found, strict=True):
        if gradient is not None:
            known = sums.get(id(leaf))
            sums[id(leaf)] = gradient if known is None else known + gradient


def paired(outputs: SpanOutputs, grads: SpanOutputs) -> list[tuple[Tensor, Tensor]]:
    """Returns the outputs that have a gradient, each with it.

    Raises:
        RequestError: ``bad_request`` if the gradients do not fit the outputs.
    """
    pairs = [(outputs.hidden, grads.hidden)]
    for name in ("hidden_states", "router_logits"):
        made, given = getattr(outputs, name), getattr(grads, name)
        if given and len(given) != len(made):
            raise _uneven(f"grad_{name}", len(given), len(made))
        pairs.extend(zip(made, given, strict=False))
    for output, grad in pairs:
        if output.shape != grad.shape:
            raise BadRequestError(f"a gradient has shape {list(grad.shape)}, its output has {list(output.shape)}")
    return pairs


def _uneven(name: str, given: int, made: int) -> BadRequestError:
    return BadRequestError(f"{name} has {given} tensors, the forward had {made}: give one each, or none")


def _wanted(inputs: SpanInputs, needs: Needs) -> list[Tensor]:
    wanted = [inputs.hidden] if needs.hidden else []
    if needs.adapters:
        wanted.extend(inputs.adapters.tensors)
    if needs.prefix:
        wanted.extend(inputs.prefix)
    return wanted


def as_leaves(inputs: SpanInputs, needs: Needs) -> SpanInputs:
    """Returns the inputs with fresh leaves of a graph where requested."""
    return dataclasses.replace(
        inputs,
        hidden=_leaf(inputs.hidden) if needs.hidden else inputs.hidden,
        adapters=inputs.adapters.map(_leaf) if needs.adapters else inputs.adapters,
        prefix=tuple(_leaf(tensor) for tensor in inputs.prefix) if needs.prefix else inputs.prefix,
    )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


class _Blockwise:
    """One backward pass, piece by piece; ``gradients`` holds what it has found, by the identity of the leaf."""

    def __init__(self, runner: SpanRunner, inputs: SpanInputs, limit_bytes: int, weights: Collection[int]) -> None:
        self.gradients: dict[int, Tensor] = {}
        self._runner = runner
        self._inputs = inputs
        self._limit_bytes = limit_bytes
        self._weights = weights

    def run(self, outputs: SpanOutputs, grads: SpanOutputs, between: Callable[[], None]) -> Tensor:
        """Returns the gradient of the first block's input, ``[B, S, D]``, from outputs with all hidden states."""
        blocks = self._inputs.blocks
        states = (self._inputs.hidden.detach(), *outputs.hidden_states)
        routers = dict(zip(outputs.router_blocks, grads.router_logits, strict=bool(grads.router_logits)))
        grad = grads.hidden
        for piece in reversed(pieces(blocks, self._runner.spec.tied)):
            first, end = piece.start - blocks.start, piece.stop - blocks.start
            given = SpanOutputs(
                hidden=grad,
                hidden_states=grads.hidden_states[first : end - 1],
                router_logits=tuple(routers[block] for block in piece if block in routers),
            )
            grad = self._through(piece, states[first], given)
            if first and grads.hidden_states:
                grad = grad + grads.hidden_states[first - 1].to(grad.dtype)
            if first:
                between()
        return grad

    def _through(self, piece: range, hidden: Tensor, grads: SpanOutputs) -> Tensor:
        inputs = dataclasses.replace(
            self._inputs.take_blocks(piece, _leaf(hidden)),
            collect_hidden=bool(grads.hidden_states),
            collect_router=bool(grads.router_logits),
        )
        meter = GraphMeter(self._limit_bytes, self._weights)
        with torch.enable_grad(), meter.recording():
            outputs = self._runner.forward(inputs)
        if meter.is_over:
            blocks = f"blocks {piece.start}:{piece.stop}" if len(piece) > 1 else f"block {piece.start}"
            raise CapacityError(
                f"the graph of {blocks} takes more than {self._limit_bytes} bytes for a batch of "
                f"{list(hidden.shape[:2])} tokens: send fewer rows at once, or use a server that allows more"
            )
        leaves = [leaf for leaf in (*inputs.adapters.tensors, *inputs.prefix) if leaf.requires_grad]
        found = backward(paired(outputs, grads), [inputs.hidden, *leaves])
        add_gradients(self.gradients, leaves, found[1:])
        return torch.zeros_like(hidden) if found[0] is None else found[0]
