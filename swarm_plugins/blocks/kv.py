"""Keys and values of sessions, under one budget in bytes.

A cache's buffers are allocated in whole pages of tokens and grow geometrically: appending costs one copy, amortised,
and attention reads one contiguous run of tokens per row and head. The pool only counts bytes. Old and new buffers
exist at the same time while a cache grows or is reordered; both are counted, so the budget is never exceeded.

Letters in shapes: ``B`` rows, ``H`` key/value heads, ``C`` allocated tokens, ``L`` cached tokens, ``S`` new tokens,
``W`` head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from swarm_plugins.errors import CapacityError, ConfigError

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
    """Counts the bytes of all sessions against a budget."""

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 1:
            raise ConfigError(f"kv_bytes must be at least 1, got {budget_bytes}: give the KV cache some memory")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Unused bytes."""
        return self.budget_bytes - self.used_bytes

    def free_tokens(self, token_bytes: int) -> int:
        """Returns how many tokens, in whole pages of one row, still fit."""
        return self.free_bytes // (token_bytes * PAGE_TOKENS) * PAGE_TOKENS if token_bytes else 0

    def fits(self, num_bytes: int) -> bool:
        """Returns whether ``num_bytes`` more are within the budget."""
        return self.used_bytes + num_bytes <= self.budget_bytes

    def reserve(self, num_bytes: int) -> None:
        """Takes ``num_bytes`` from the budget.

        Raises:
            CapacityError: If the budget has no room; nothing is taken then.
        """
        if not self.fits(num_bytes):
            raise CapacityError(
                f"the KV cache is full: {self.used_bytes} bytes used, {num_bytes} more asked, limit "
                f"{self.budget_bytes}; close sessions, shorten the sequence or serve with a larger kv_bytes"
            )
        self.used_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Returns ``num_bytes`` to the budget."""
        self.used_bytes -= num_bytes


class KVCache:
    """Keys and values of one session, for the blocks it was opened with. It takes no memory before its first tokens."""

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
        self.batch_size = batch_size
        self._token_bytes = sum(layout.token_bytes for layout in self._layouts.values())
        # Without tokens, and so without memory.
        self._buffers = {
            block: self._moved(block, layout, 0, None, batch_size) for block, layout in self._layouts.items()
        }
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes taken from the budget."""
        return self.batch_size * self.capacity * self._token_bytes

    def reserve(self, new_tokens: int) -> None:
        """Makes room for ``new_tokens`` more tokens per row, in all blocks at once.

        Raises:
            CapacityError: If the budget has no room; the cache is unchanged then.
            ConfigError: If the cache is closed.
        """
        self._check_open()
        needed = self.length + new_tokens
        if needed > self.capacity:
            ample = in_pages(max(needed, self.capacity + self.capacity // 2))
            # By half where there is plenty of room, so that others still find some; else by the minimum.
            self._move(ample if self._pool.fits(2 * self._cost(ample)) else in_pages(needed), None)

    def append(self, block: int, keys: Tensor, values: Tensor) -> None:
        """Writes ``[B, H, S, W]`` after the cached tokens of a block; they count when ``length`` is advanced."""
        key_buffer, value_buffer = self._buffers[block]
        num_new = keys.shape[2]
        key_buffer.narrow(2, self.length, num_new).copy_(keys)
        value_buffer.narrow(2, self.length, num_new).copy_(values)

    def view(self, block: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns the first ``length`` tokens of a block, ``[B, H, length, W]``, without a copy."""
        key_buffer, value_buffer = self._buffers[block]
        return key_buffer.narrow(2, 0, length), value_buffer.narrow(2, 0, length)

    def crop(self, length: int) -> None:
        """Keeps the first ``length`` tokens. The memory stays with the cache.

        Raises:
            ConfigError: If the cache is shorter, or closed.
        """
        self._check_open()
        if not 0 <= length <= self.length:
            raise ConfigError(f"cannot crop to {length} tokens: the cache holds {self.length}")
        self.length = length

    def select(self, indices: Sequence[int]) -> None:
        """Makes row ``i`` the old row ``indices[i]``.

        Raises:
            ConfigError: If ``indices`` is empty or names a row that does not exist.
            CapacityError: If the budget has no room; the cache is unchanged then.
        """
        self._check_open()
        rows = list(indices)
        if not rows:
            raise ConfigError("select needs at least one row index")
        for row in rows:
            if not 0 <= row < self.batch_size:
                raise ConfigError(f"row index {row} is out of range: the cache has {self.batch_size} rows")
        if rows != list(range(self.batch_size)):
            self._move(self.capacity, rows)

    def fork(self) -> KVCache:
        """Returns an independent copy.

        Raises:
            CapacityError: If the budget has no room for it.
        """
        self._check_open()
        copy = KVCache(self._pool, self._layouts, self.blocks, self.batch_size, self._device)
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
        """Returns the memory to the budget. Idempotent."""
        if not self._is_closed:
            self._pool.release(self.num_bytes)
            self._is_closed = True
            self._buffers.clear()
            self.capacity = self.length = 0

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("the session's cache is closed: open another session")

    def _cost(self, capacity: int, batch_size: int | None = None) -> int:
        """Bytes needed on top to move to a capacity, while the largest block has both its old and new buffers."""
        rows = self.batch_size if batch_size is None else batch_size
        largest = max((layout.token_bytes for layout in self._layouts.values()), default=0)
        old, new = self.batch_size * self.capacity, rows * capacity
        # Blocks move one by one: the peak is at the last when growing, at the first when shrinking.
        return max(new - old, 0) * self._token_bytes + largest * min(old, new)

    def _move(self, capacity: int, rows: list[int] | None) -> None:
        """Re-allocates all buffers for a capacity and, if given, for other rows."""
        num_rows = self.batch_size if rows is None else len(rows)
        cost = self._cost(capacity, num_rows)
        self._pool.reserve(cost)
        before = self.num_bytes
        try:
            for block, layout in self._layouts.items():
                self._buffers[block] = self._moved(block, layout, capacity, rows, num_rows)
        except BaseException:
            # Out of real memory half-way: the buffers differ in shape now, so the cache is unusable.
            self._pool.release(cost)
            self.close()
            raise
        self.capacity, self.batch_size = capacity, num_rows
        self._pool.release(cost - (self.num_bytes - before))

    def _moved(
        self, block: int, layout: BlockKV, capacity: int, rows: list[int] | None, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        def empty(heads: int, width: int) -> Tensor:
            return torch.empty(num_rows, heads, capacity, width, dtype=layout.dtype, device=self._device)

        keys, values = empty(layout.key_heads, layout.key_width), empty(layout.value_heads, layout.value_width)
        if self.length:
            for new, old in zip((keys, values), self.view(block, self.length), strict=True):
                kept = new.narrow(2, 0, self.length)
                if rows is None:
                    kept.copy_(old)
                else:
                    for target, source in enumerate(rows):
                        kept[target].copy_(old[source])
        return keys, values


def in_pages(tokens: int) -> int:
    """Returns the tokens that whole pages for so many hold."""
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS
