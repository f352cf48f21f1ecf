"""Forwards and backwards in portions: their outputs and gradients are joined to those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from swarm_plugins.block_io import SpanOutputs, join_outputs
from swarm_plugins.blocks.runner import SpanRunner
from swarm_plugins.server.failures import BadRequestError
from swarm_plugins.server.state.cutting import Portion, join_rows
from swarm_plugins.server.state.gradients import (
    Gradients,
    KeptForward,
    Needs,
    as_leaves,
    forward_keeping,
    forward_only,
    gradients,
    paired,
)
from swarm_plugins.server.state.long_rows import LongRows


def run_forward(
    runner: SpanRunner,
    portions: Sequence[Portion],
    *,
    keep_bytes: int = 0,
    weights: Collection[int] = (),
    between: Callable[[], None] = lambda: None,
) -> tuple[SpanOutputs, tuple[KeptForward, ...] | None, int]:
    """Runs portions one after another.

    Returns:
        The outputs; the forwards with their graphs, None if they do not fit in ``keep_bytes``; the bytes they hold.
    """
    outputs: list[SpanOutputs] = []
    kept: list[KeptForward] = []
    held, is_keeping = 0, keep_bytes > 0 and all(one.part_tokens is None for one in portions)
    for index, one in enumerate(portions):
        if index:
            between()
        inputs = one.inputs.map(lambda tensor: tensor.to(runner.spec.device))
        if one.part_tokens is not None:
            made = LongRows(runner, inputs, one.part_tokens, between).forward()
        elif is_keeping:
            made, forward, num_bytes = forward_keeping(runner, inputs, limit_bytes=keep_bytes - held, weights=weights)
            held += num_bytes
            if forward is None:
                is_keeping = False
                kept.clear()
            else:
                kept.append(forward)
        else:
            made = forward_only(runner, inputs)
        outputs.append(made.map(Tensor.cpu))
    return join_outputs(outputs, dim=0), tuple(kept) if is_keeping else None, held if is_keeping else 0


def run_backward(
    runner: SpanRunner,
    parts: Sequence[KeptForward | Portion],
    grads: SpanOutputs,
    needs: Needs,
    *,
    limit_bytes: int = 1 << 62,
    weights: Collection[int] = (),
    between: Callable[[], None] = lambda: None,
) -> Gradients:
    """Returns the gradients of kept forwards, or of portions that run (again) for it; see `gradients`."""
    found: list[Gradients] = []
    first = 0
    if len(parts) > 1:
        _check_rows(grads, sum(part.inputs.hidden.shape[0] for part in parts))
    for index, part in enumerate(parts):
        if index:
            between()
        count = part.inputs.hidden.shape[0]
        share = grads if len(parts) == 1 else grads.take_rows(slice(first, first + count))
        first += count
        share = share.map(lambda tensor: tensor.to(runner.spec.device))
        if isinstance(part, KeptForward):
            one = gradients(runner, part, share, needs)
        elif part.part_tokens is None:
            inputs = part.inputs.map(lambda tensor: tensor.to(runner.spec.device))
            one = gradients(runner, inputs, share, needs, limit_bytes=limit_bytes, weights=weights, between=between)
        else:
            one = _of_long_rows(runner, part, share, needs, between)
        found.append(one)
    return _joined(found)


def _of_long_rows(
    runner: SpanRunner, part: Portion, grads: SpanOutputs, needs: Needs, between: Callable[[], None]
) -> Gradients:
    given = part.inputs.map(lambda tensor: tensor.to(runner.spec.device))
    inputs = as_leaves(given, Needs(hidden=False, adapters=needs.adapters))
    rows = LongRows(runner, inputs, part.part_tokens or 1, between)
    outputs = rows.forward()
    paired(outputs, grads)
    hidden = rows.backward(grads, outputs.router_blocks)
    leaves = inputs.adapters.tensors if needs.adapters else ()
    prefix = [rows.prefix_gradients[block] for block in inputs.blocks] if needs.prefix and inputs.prefix else []
    return Gradients(
        hidden=hidden if needs.hidden else None,
        adapters=tuple(rows.gradients.get(id(leaf), torch.zeros_like(leaf)).detach() for leaf in leaves),
        prefix=tuple(tensor for pair in prefix for tensor in pair),
    )


def _check_rows(grads: SpanOutputs, num_rows: int) -> None:
    for tensor in (grads.hidden, *grads.hidden_states):
        if tensor.shape != grads.hidden.shape or tensor.shape[0] != num_rows:
            raise BadRequestError(f"a gradient has shape {list(tensor.shape)}, the forward had {num_rows} rows")
    tokens = num_rows * grads.hidden.shape[1]
    for tensor in grads.router_logits:
        if tensor.ndim != 2 or tensor.shape[0] != tokens:
            raise BadRequestError(
                f"a gradient of router logits has shape {list(tensor.shape)}, expected [{tokens}, experts]"
            )


def _joined(parts: Sequence[Gradients]) -> Gradients:
    if len(parts) == 1:
        return parts[0]
    hidden = [part.hidden for part in parts if part.hidden is not None]
    sums = list(parts[0].adapters)
    for part in parts[1:]:
        sums = [one + other for one, other in zip(sums, part.adapters, strict=True)]
    return Gradients(
        hidden=join_rows(hidden) if hidden else None,
        adapters=tuple(sums),
        prefix=tuple(join_rows(rows) for rows in zip(*(part.prefix for part in parts), strict=True)),
    )
