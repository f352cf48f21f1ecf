"""The tokens that some blocks of a session keep: all of them, or those that later ones see through a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from swarm_plugins.block_io import in_pages, kept_by_window
from swarm_plugins.blocks.buffers import Buffer
from swarm_plugins.blocks.layout import BlockKV, first_kept


class Kept:
    """The buffers of blocks that keep the same tokens."""

    def __init__(self, layouts: Mapping[int, BlockKV], window: int, num_rows: int, device: torch.device) -> None:
        self.layouts = layouts
        self.window = window
        self.first = 0
        """The first token that is there, at the beginning of a page."""
        self.capacity = 0
        """Tokens that there is room for, from that one on."""
        self.token_bytes = sum(layout.token_bytes for layout in layouts.values())
        self.largest = max(layout.token_bytes for layout in layouts.values())
        self._device = device
        self._most = kept_by_window(window) if window else 1 << 62
        self.buffers = {block: empty_buffers(layout, num_rows, 0, device) for block, layout in layouts.items()}

    def place_for(self, length: int, needed: int, to_come: int = 0) -> tuple[int, int]:
        """Returns the first token to keep of ``length``, and the minimum capacity for ``needed`` tokens.

        Includes room for the ``to_come`` tokens that follow, as far as the window keeps them.
        """
        first = max(self.first if length else 0, first_kept(self.window, length))
        least = in_pages(needed) - first
        return first, max(least, min(in_pages(needed + to_come) - first, self._most))

    def ample(self, capacity: int) -> int:
        """Returns a capacity of at least so many tokens, with which few moves follow."""
        return max(capacity, min(in_pages(self.capacity + self.capacity // 2), self._most))

    def is_due(self, length: int, needed: int) -> bool:
        """Returns whether buffers move before a step: they are too small, or hold much more than a window."""
        first, _ = self.place_for(length, needed)
        return needed - self.first > self.capacity or (self.capacity > self._most and first > self.first)

    def can_go_back(self, length: int) -> bool:
        """Returns whether all that tokens from ``length`` on see is there."""
        return self.first <= max(0, length - self.window + 1)

    def moved(
        self, block: int, length: int, first: int, capacity: int, rows: Sequence[int] | None, num_rows: int
    ) -> tuple[Buffer, ...]:
        """Returns other buffers of a block, with the tokens from ``first`` to ``length`` of all rows, or of some."""
        buffers = empty_buffers(self.layouts[block], num_rows, capacity, self._device)
        if self.capacity and length > first:
            for new, old in zip(buffers, self.buffers[block], strict=True):
                new.take(old, first - self.first, length - first, rows)
        return buffers


class Move(NamedTuple):
    """New buffers for some blocks."""

    kept: Kept
    first: int
    capacity: int


def empty_buffers(layout: BlockKV, num_rows: int, capacity: int, device: torch.device) -> tuple[Buffer, ...]:
    """Returns buffers for keys, values and an indexer's keys of one block."""
    return tuple(Buffer(heads, num_rows, capacity, device) for heads in layout.heads)
