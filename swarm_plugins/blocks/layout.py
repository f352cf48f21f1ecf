"""What blocks cache of each token and of each row, and how many bytes sessions take by that."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch

from swarm_plugins.block_io import PAGE_TOKENS, ROLLBACK_TOKENS, kept_by_window
from swarm_plugins.blocks.buffers import Heads


class BlockKV(NamedTuple):
    """What one block caches for one token of one row."""

    key_heads: int
    key_width: int
    value_heads: int
    value_width: int
    dtype: torch.dtype
    index_width: int = 0
    """Of an indexer's keys, by which attention chooses tokens."""
    index_dtype: torch.dtype = torch.float32
    row_bytes: int = 0
    """Bytes of the states of one row, whatever its length."""
    grown_bytes: int = 0
    """Bytes by which the states of one row grow with a token."""
    slots: int = 1
    """How many keys and values it caches, one for each attention in it."""
    window: int = 0
    """How many tokens each token sees, itself included, where those before may go. 0: all are kept."""
    is_coded: bool = False
    """Whether keys and values are kept as codes of 8 bits."""

    @property
    def heads(self) -> tuple[Heads, Heads, Heads]:
        """Keys, values, and an indexer's keys of one token."""
        return (
            Heads(self.slots * self.key_heads, self.key_width, self.dtype, self.is_coded, has_zero=True),
            Heads(self.slots * self.value_heads, self.value_width, self.dtype, self.is_coded),
            Heads(min(1, self.index_width), self.index_width, self.index_dtype),
        )

    def coded(self) -> BlockKV:
        """Returns the same with keys and values, if there are any, as codes."""
        return self._replace(is_coded=self.key_heads > 0)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one row."""
        # The states now, and those before the last step.
        return sum(heads.num_bytes for heads in self.heads) + 2 * self.grown_bytes

    @property
    def has_states(self) -> bool:
        """Whether the block has states besides keys and values."""
        return self.row_bytes > 0 or self.grown_bytes > 0

    @property
    def is_plain(self) -> bool:
        """Whether it is keys and values, and nothing else."""
        return self.key_heads > 0 and self.slots == 1 and not (self.index_width or self.has_states)


def first_kept(window: int, length: int) -> int:
    """Returns the first token, at the beginning of a page, that sessions of this length still need."""
    return max(0, length - window + 1 - ROLLBACK_TOKENS) // PAGE_TOKENS * PAGE_TOKENS if window else 0


class SessionBytes(NamedTuple):
    """What the caches of some blocks take."""

    token_bytes: int
    """Of one token of one row, in the blocks that keep all tokens."""
    window_bytes: int
    """The same, in those that keep a window."""
    window_tokens: int
    """The most tokens that these keep, see `kept_by_window`."""
    row_bytes: int
    """Of one row at any length: its states, and those before the last step."""
    largest: tuple[int, int]
    """Bytes per token of the largest block that keeps all tokens, and of the largest one with a window."""

    @classmethod
    def of(cls, layouts: Iterable[BlockKV]) -> SessionBytes:
        """Returns what some blocks take."""
        known = list(layouts)
        window = max((one.window for one in known), default=0)
        return cls(
            sum(one.token_bytes for one in known if not one.window),
            sum(one.token_bytes for one in known if one.window),
            kept_by_window(window) if window else 0,
            2 * sum(one.row_bytes for one in known),
            (
                max((one.token_bytes for one in known if not one.window), default=0),
                max((one.token_bytes for one in known if one.window), default=0),
            ),
        )

    def tokens_in(self, num_bytes: int) -> int:
        """Returns how many tokens of one row fit; ``sys.maxsize`` if any number does."""
        free, both = num_bytes - self.row_bytes, self.token_bytes + self.window_bytes
        if free < 0:
            return 0
        if both and free // both < self.window_tokens:
            return free // both
        kept = self.window_tokens * self.window_bytes
        return (free - kept) // self.token_bytes if self.token_bytes else sys.maxsize

    def pages_in(self, num_bytes: int) -> int:
        """Returns how many tokens one row can grow to, in whole pages.

        Blocks grow one at a time. While the largest one moves, its old buffers, a page smaller, take memory as well.
        """
        of_all, of_window = self.largest
        both = self._replace(token_bytes=self.token_bytes + of_all, window_bytes=self.window_bytes + of_window)
        return both.tokens_in(num_bytes + PAGE_TOKENS * of_all) // PAGE_TOKENS * PAGE_TOKENS
