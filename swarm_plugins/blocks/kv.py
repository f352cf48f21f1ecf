"""Keys and values of sessions, under one budget in bytes.

A session's buffers are allocated in whole pages of tokens and grow geometrically, so that appending costs amortised
one copy and attention reads one contiguous run of tokens per row and head. The pool only counts: what a growth or a
reordering needs on top while old and new buffers exist side by side is counted too, so the budget is never exceeded,
not even for a moment.

Letters in shapes: ``B`` rows, ``H`` key/value heads, ``C`` allocated tokens, ``L`` cached tokens, ``S`` new tokens,
``W`` head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from swarm_plugins.errors import CapacityError, ConfigError

__all__ = ["PAGE_TOKENS", "BlockKV", "KVCache", "KVPool"]

PAGE_TOKENS = 64
"""Tokens are allocated in multiples of this."""


class BlockKV(NamedTuple):
    """What one block caches for one token of one row."""

    key_heads: int
    key_width: int
    value_heads: int
    value_width: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one row."""
        width = self.key_heads * self.key_width + self.value_heads * self.value_width
        return width * self.dtype.itemsize


class KVPool:
    """Counts the bytes of all sessions against a budget.

    Args:
        budget_bytes: Upper bound for the keys and values of all sessions together.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 1:
            raise ConfigError(f"kv_bytes must be at least 1, got {budget_bytes}: give the KV cache some memory")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that are not in use."""
        return self.budget_bytes - self.used_bytes

    def free_tokens(self, token_bytes: int) -> int:
        """Returns how many tokens, in whole pages of one row, still fit."""
        return self.free_bytes // (token_bytes * PAGE_TOKENS) * PAGE_TOKENS if token_bytes else 0

    def fits(self, num_bytes: int) -> bool:
        """Says whether ``num_bytes`` more are within the budget."""
        return self.used_bytes + num_bytes <= self.budget_bytes

    def reserve(self, num_bytes: int) -> None:
        """Takes ``num_bytes`` from the budget.

        Raises:
            CapacityError: If they are not there; nothing is taken then.
        """
        if not self.fits(num_bytes):
            raise CapacityError(
                f"the KV cache is full: {self.used_bytes} bytes used, {num_bytes} more asked, limit "
                f"{self.budget_bytes}; close sessions, shorten the sequence or serve with a larger kv_bytes"
            )
        self.used_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Gives ``num_bytes`` back."""
        self.used_bytes -= num_bytes


class KVCache:
    """Keys and values of one session; see `SessionCache`.

    Args:
        pool: The budget.
        layouts: What each block caches; blocks without an entry cache nothing.
        blocks: Global indices of the session's blocks.
        batch_size: Rows.
        device: Where the buffers lie.

    Raises:
        CapacityError: If there is no room for a first page.
    """

    def __init__(
        self, pool: KVPool, layouts: Mapping[int, BlockKV], blocks: range, batch_size: int, device: torch.device
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
        self.blocks = blocks
        self.length = 0
        self.capacity = 0
        self._pool = pool
        self._device = device
        self._layouts = {block: layouts[block] for block in blocks if block in layouts}
        self._batch_size = batch_size
        self._token_bytes = sum(layout.token_bytes for layout in self._layouts.values())
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._is_closed = False
        self.reserve(1)

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self._batch_size

    @property
    def num_bytes(self) -> int:
        """Bytes taken from the budget."""
        return self._batch_size * self.capacity * self._token_bytes

    def reserve(self, new_tokens: int) -> None:
        """Makes room for ``new_tokens`` more tokens per row, in all blocks at once.

        Raises:
            CapacityError: If the budget has no room; the session is as it was then.
            ConfigError: If the session is closed.
        """
        self._check_open()
        needed = self.length + new_tokens
        if needed > self.capacity:
            ample = _pages(max(needed, self.capacity + self.capacity // 2))
            # Grow by half where there is room, else by what is needed.
            exact = _pages(needed)
            self._move(ample if self._pool.fits(self._cost(ample)) else exact, None)

    def append(self, block: int, keys: Tensor, values: Tensor) -> None:
        """Writes new tokens behind the cached ones; they count when ``length`` is advanced.

        Args:
            block: Global index.
            keys: ``[B, H, S, W]``.
            values: ``[B, H, S, W]``.
        """
        key_buffer, value_buffer = self._buffers[block]
        num_new = keys.shape[2]
        key_buffer.narrow(2, self.length, num_new).copy_(keys)
        value_buffer.narrow(2, self.length, num_new).copy_(values)

    def view(self, block: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns the first ``length`` tokens of a block, ``[B, H, length, W]``, without a copy."""
        key_buffer, value_buffer = self._buffers[block]
        return key_buffer.narrow(2, 0, length), value_buffer.narrow(2, 0, length)

    def crop(self, length: int) -> None:
        """Keeps the first ``length`` tokens. The memory stays with the session.

        Raises:
            ConfigError: If the cache is shorter, or closed.
        """
        self._check_open()
        if not 0 <= length <= self.length:
            raise ConfigError(
                f"cannot crop to {length} tokens: the cache holds {self.length}; allowed 0 to {self.length}"
            )
        self.length = length

    def select(self, indices: Sequence[int]) -> None:
        """Makes row ``i`` the old row ``indices[i]``.

        Raises:
            ConfigError: If there are no indices, or one is not a row.
            CapacityError: If the budget has no room; the session is as it was then.
        """
        self._check_open()
        rows = list(indices)
        if not rows:
            raise ConfigError("select needs at least one row index")
        for row in rows:
            if not 0 <= row < self._batch_size:
                raise ConfigError(f"row index {row} is out of range: the session has {self._batch_size} rows")
        if rows != list(range(self._batch_size)):
            self._move(self.capacity, rows)

    def fork(self) -> KVCache:
        """Returns an independent copy.

        Raises:
            CapacityError: If the budget has no room for it.
        """
        self._check_open()
        copy = KVCache(self._pool, self._layouts, self.blocks, self._batch_size, self._device)
        try:
            copy.reserve(self.length)
        except CapacityError:
            copy.close()
            raise
        for block in self._layouts:
            copy.append(block, *self.view(block, self.length))
        copy.length = self.length
        return copy

    def close(self) -> None:
        """Gives the memory back to the budget. Idempotent."""
        if not self._is_closed:
            self._pool.release(self.num_bytes)
            self._is_closed = True
            self._buffers.clear()
            self.capacity = self.length = 0

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("the session is closed: open another one")

    def _cost(self, capacity: int, batch_size: int | None = None) -> int:
        """Bytes needed on top to move to a capacity, with the largest block's old and new buffers side by side."""
        rows = self._batch_size if batch_size is None else batch_size
        largest = max((layout.token_bytes for layout in self._layouts.values()), default=0)
        old, new = self._batch_size * self.capacity, rows * capacity
        # Blocks move one by one; whether the peak is at the first or at the last depends on which side is larger.
        return max(new - old, 0) * self._token_bytes + largest * min(old, new)

    def _move(self, capacity: int, rows: list[int] | None) -> None:
        """Re-allocates all buffers for a capacity and, if given, for other rows."""
        num_rows = self._batch_size if rows is None else len(rows)
        cost = self._cost(capacity, num_rows)
        self._pool.reserve(cost)
        before = self.num_bytes
        try:
            for block, layout in self._layouts.items():
                self._buffers[block] = self._moved(block, layout, capacity, rows, num_rows)
        except BaseException:
            # Out of real memory half-way: the buffers differ in shape now, so that the session cannot go on.
            self._pool.release(cost)
            self.close()
            raise
        self.capacity, self._batch_size = capacity, num_rows
        self._pool.release(cost - (self.num_bytes - before))

    def _moved(
        self, block: int, layout: BlockKV, capacity: int, rows: list[int] | None, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        shape = (num_rows, layout.key_heads, capacity, layout.key_width)
        keys = torch.empty(shape, dtype=layout.dtype, device=self._device)
        shape = (num_rows, layout.value_heads, capacity, layout.value_width)
        values = torch.empty(shape, dtype=layout.dtype, device=self._device)
        if self.length:
            old_keys, old_values = self.view(block, self.length)
            for new, old in ((keys, old_keys), (values, old_values)):
                kept = new.narrow(2, 0, self.length)
                if rows is None:
                    kept.copy_(old)
                else:
                    for target, source in enumerate(rows):
                        kept[target].copy_(old[source])
        return keys, values


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS
