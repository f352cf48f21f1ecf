"""Forwards and backwards in portions: their outputs and gradients are joined to those of the whole batch.

Both are generators, which yield between two portions and after each part of a long row: other work may run there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Generator, Sequence

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
    keep: Callable[[KeptForward, int], bool] | None = None,
    keep_bytes: int = 0,
    weights: Collection[int] = (),
) -> Generator[None, None, SpanOutputs]:
    """Runs portions one after another; returns their outputs.

    Args:
        runner: The span.
        portions: What runs.
        keep: Gets each portion with its graph and the bytes it holds, as long as it returns True. None: no graphs.
        keep_bytes: Most bytes of all graphs together.
        weights: Addresses of the span's own storages, which do not count.
    """
    outputs: list[SpanOutputs] = []
    held = 0
    for index, one in enumerate(portions):
        if index:
            yield
        made, num_bytes = yield from _run_portion(runner, one, keep, keep_bytes - held, weights)
        held += num_bytes or 0
        if num_bytes is None:
            keep = None
        outputs.append(made)
    return join_outputs(outputs, dim=0)


def _run_portion(
    runner: SpanRunner,
    portion: Portion,
    keep: Callable[[KeptForward, int], bool] | None,
    limit_bytes: int,
    weights: Collection[int],
) -> Generator[None, None, tuple[SpanOutputs, int | None]]:
    """Returns the outputs of a portion, and the bytes of its graph, None if that is not kept."""
    # Nothing of it stays in a frame that waits for its turn: a graph that the store gives up is to be freed.
    inputs = portion.inputs.map(lambda tensor: tensor.to(runner.spec.device))
    if portion.part_tokens is not None:
        made = yield from LongRows(runner, inputs, portion.part_tokens).forward()
    elif keep is None:
        made = forward_only(runner, inputs)
    else:
        made, forward, num_bytes = forward_keeping(runner, inputs, limit_bytes=limit_bytes, weights=weights)
        if forward is not None and keep(forward, num_bytes):
            return made.map(Tensor.cpu), num_bytes
    return made.map(Tensor.cpu), None


def run_backward(
    runner: SpanRunner,
    parts: Sequence[KeptForward | Portion],
    grads: SpanOutputs,
    needs: Needs,
    *,
    limit_bytes: int = 1 << 62,
    weights: Collection[int] = (),
    between: Callable[[], None] = lambda: None,
) -> Generator[None, None, Gradients]:
    """Returns the gradients of kept forwards, or of portions that run (again) for it; see `gradients`."""
    found: list[Gradients] = []
    sums: tuple[Tensor, ...] = ()
    first = 0
    if len(parts) > 1:
        _check_rows(grads, sum(part.inputs.hidden.shape[0] for part in parts))
    for index, part in enumerate(parts):
        if index:
            yield
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
            one = yield from _of_long_rows(runner, part, share, needs)
        # Added up at once: a batch of many portions would hold as many gradients of its adapters.
        sums = tuple(map(torch.add, sums, one.adapters)) if index else one.adapters
        found.append(dataclasses.replace(one, adapters=()))
    return _joined(found, sums)


def _of_long_rows(
    runner: SpanRunner, part: Portion, grads: SpanOutputs, needs: Needs
) -> Generator[None, None, Gradients]:
    given = part.inputs.map(lambda tensor: tensor.to(runner.spec.device))
    inputs = as_leaves(given, Needs(hidden=False, adapters=needs.adapters))
    rows = LongRows(runner, inputs, part.part_tokens or 1)
    outputs = yield from rows.forward()
    paired(outputs, grads)
    hidden = yield from rows.backward(grads, outputs.router_blocks)
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


def _joined(parts: Sequence[Gradients], adapters: tuple[Tensor, ...]) -> Gradients:
    hidden = [part.hidden for part in parts if part.hidden is not None]
    return Gradients(
        hidden=join_rows(hidden) if hidden else None,
        adapters=adapters,
        prefix=tuple(join_rows(rows) for rows in zip(*(part.prefix for part in parts), strict=True)),
    )
