"""Probes a model's layer loop while it is loaded.

A few families pass more than hidden states from layer to layer, or compute something between layers. The probe finds
out before any data is read, instead of a wrong token later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from swarm_plugins.block_io import RETURN_FORMS, is_same
from swarm_plugins.columns import Arguments, Columns, find_carried, find_columns
from swarm_plugins.errors import UnsupportedError, one_line

if TYPE_CHECKING:
    from swarm_plugins.backbone.stack import RemoteStack


_FAULTS = (UnsupportedError, RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""What a model raises whose layers are called otherwise."""


class _Watch:
    """Replaces all blocks and checks how they are called."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids
        self.inputs: dict[int, Tensor] = {}
        """The hidden states that each block is called with."""
        self.handed: Sequence[Tensor] = ()
        """What the first block returns behind hidden states."""
        self.calls: list[int] = []
        self.arguments: dict[int, Arguments] = {}
        self.last: Tensor | None = None
        self.are_ids_given = False

    def run_block(self, index: int, hidden: Tensor, cache: Any, arguments: Arguments) -> Any:
        self.are_ids_given |= any(value is self.ids for value in arguments.values())
        if self.last is not None and not is_same(hidden, self.last):
            raise UnsupportedError(f"hidden states are changed between blocks {index - 1} and {index}")
        self.calls.append(index)
        self.arguments[index] = arguments
        self.inputs[index] = hidden
        # A new tensor, like a server's answer, that does not depend on the embeddings.
        self.last = torch.full_like(hidden, len(self.inputs))
        return (self.last, *self.handed) if self.handed and len(self.inputs) == 1 else self.last


def probe_layer_loop(
    base: nn.Module, stack: RemoteStack, device: torch.device | str, twin: nn.Module | None = None
) -> None:
    """Calls the base model, with blocks that do nothing; notes what it gives them and expects of them.

    Args:
        base: The model.
        stack: Its remote blocks, which learn it.
        device: Of the model.
        twin: The first block on the meta device: tells the shape of what layers hand on. None: they hand on nothing.

    Raises:
        UnsupportedError: If the model's forward does something servers do not know about.
    """
    reasons = []
    for stack.num_returned in RETURN_FORMS:
        watch = _Watch(torch.zeros(1, 3, dtype=torch.long, device=device))
        try:
            _run(base, stack, watch)
        except _FAULTS as exc:
            reasons.append(one_line(exc) if isinstance(exc, UnsupportedError) else one_line(exc, with_kind=True))
            continue
        # Without images, blocks that look at them are not called (Mllama).
        if watch.calls and watch.calls == sorted(set(watch.calls)):
            stack.called = watch.calls
            stack.takes_ids = watch.are_ids_given
            stack.columns = _columns(base, stack, watch, twin)
            return
        reasons.append(f"blocks are called in the order {watch.calls}")
    raise UnsupportedError(
        f"{type(base).__name__} cannot have remote blocks: it does not call its layers one after another "
        f"({reasons[0]}); use a model of another family"
    )


def _run(base: nn.Module, stack: RemoteStack, watch: _Watch) -> None:
    stack.run_block = watch.run_block  # type: ignore[method-assign]
    try:
        with torch.no_grad(), stack.noting():
            output = base(input_ids=watch.ids, use_cache=False)
    finally:
        del stack.run_block
    if output[0].shape[:2] != (1, 3):
        raise UnsupportedError(f"its output has shape {list(output[0].shape)}")


def _columns(base: nn.Module, stack: RemoteStack, watch: _Watch, twin: nn.Module | None) -> Columns:
    """Returns what passes between servers: side inputs are other ones for other tokens."""
    if not watch.inputs:
        return Columns()
    other = _Watch(watch.ids + torch.arange(1, 4, device=watch.ids.device))
    _run(base, stack, other)

    def is_side(block: int, key: int | str, value: Tensor) -> bool:
        return not torch.equal(value, other.arguments[block][key])

    columns = find_columns(watch.ids.shape, watch.inputs, watch.arguments, is_side)
    carried = _carried(base, stack, watch.ids) if twin is not None else {}
    if twin is not None and carried:
        first = watch.calls[0]
        returned = _on_meta(twin, watch.inputs[first], watch.arguments[first])
        # Not an object with states, which layers hand on if there is a cache, nor indices: blocks that are not tied
        # choose tokens themselves.
        carried = {key: place for key, place in carried.items() if _is_floating(returned[place])}
        columns = columns.with_carried(carried, [tuple(returned[place].shape[2:]) for place in carried.values()])
    return columns


def _carried(base: nn.Module, stack: RemoteStack, ids: Tensor) -> dict[int | str, int]:
    """Returns what each block hands on to the next one. What is handed on to tied blocks does not travel."""
    watch = _Watch(ids)
    watch.handed = [torch.zeros(1, 3, 1, device=ids.device) for _ in range(1, stack.num_returned)]
    if not watch.handed or stack.tied:
        return {}
    try:
        _run(base, stack, watch)
    except _FAULTS:
        return {}
    return find_carried(watch.handed, watch.arguments.get(1, {}))


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _on_meta(layer: nn.Module, hidden: Tensor, arguments: Arguments) -> Any:
    """Returns what a layer returns, without values."""

    def on_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    hidden, arguments = tree_map(on_meta, (hidden, dict(arguments)))
    places = [value for key, value in arguments.items() if isinstance(key, int)]
    names = {key: value for key, value in arguments.items() if isinstance(key, str)}
    with torch.no_grad():
        return layer(hidden, *places, **names)
