"""Probes a model's layer loop while it is loaded.

A few families pass more than hidden states from layer to layer, or compute something between layers. The probe finds
out before any data is read, instead of a wrong token later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from swarm_plugins.block_io import RETURN_FORMS, is_same
from swarm_plugins.columns import Arguments, Columns, find_columns
from swarm_plugins.errors import UnsupportedError

if TYPE_CHECKING:
    from swarm_plugins.backbone.stack import RemoteStack


class _Watch:
    """Replaces the remote blocks and checks how they are called."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids
        self.shape: Sequence[int] = ()
        self.calls: list[int] = []
        self.arguments: dict[int, Arguments] = {}
        self.last: Tensor | None = None
        self.are_ids_given = False

    def run_block(self, index: int, hidden: Tensor, cache: Any, arguments: Arguments) -> Tensor:
        self.are_ids_given |= any(value is self.ids for value in arguments.values())
        if self.last is not None and not is_same(hidden, self.last):
            raise UnsupportedError(f"hidden states are changed between blocks {index - 1} and {index}")
        self.calls.append(index)
        self.arguments[index] = arguments
        self.shape = self.shape or hidden.shape
        # A new tensor, like a server's answer, that does not depend on the embeddings.
        self.last = torch.zeros_like(hidden)
        return self.last


def probe_layer_loop(base: nn.Module, stack: RemoteStack, device: torch.device | str) -> None:
    """Calls the base model once, with blocks that return their input; notes what it gives them and expects of them.

    Raises:
        UnsupportedError: If the model's forward does something servers do not know about.
    """
    reasons = []
    for stack.num_returned in RETURN_FORMS:
        watch = _Watch(torch.zeros(1, 3, dtype=torch.long, device=device))
        try:
            _run(base, stack, watch)
        except (UnsupportedError, RuntimeError, TypeError, ValueError, IndexError, AttributeError) as exc:
            reasons.append(str(exc))
            continue
        if watch.calls == list(stack.blocks):
            stack.takes_ids = watch.are_ids_given
            stack.columns = _columns(base, stack, watch)
            return
        reasons.append(f"blocks are called in the order {watch.calls}")
    raise UnsupportedError(
        f"{type(base).__name__} cannot have remote blocks: it does not call its layers one after another "
        f"({reasons[0]}); use a model of another family"
    )


def _run(base: nn.Module, stack: RemoteStack, watch: _Watch) -> None:
    stack.run_block = watch.run_block  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            output = base(input_ids=watch.ids, use_cache=False)
    finally:
        del stack.run_block
    if output[0].shape[:2] != (1, 3):
        raise UnsupportedError(f"its output has shape {list(output[0].shape)}")


def _columns(base: nn.Module, stack: RemoteStack, watch: _Watch) -> Columns:
    """Returns what passes between servers: side inputs are other ones for other tokens."""
    other = _Watch(watch.ids + torch.arange(1, 4, device=watch.ids.device))
    _run(base, stack, other)

    def is_side(block: int, key: int | str, value: Tensor) -> bool:
        return not torch.equal(value, other.arguments[block][key])

    columns = find_columns(watch.ids.shape, watch.shape, watch.arguments, is_side)
    if columns.shapes and any(stack.local_blocks):
        raise UnsupportedError(
            f"local_blocks={stack.local_blocks} cannot work with {type(base).__name__}, whose layers take more than "
            "hidden states: leave all blocks to servers (local_blocks=(0, 0))"
        )
    return columns
