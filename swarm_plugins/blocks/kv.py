"""Keys, values and other states of sessions, under one budget in bytes.

A cache's buffers are allocated in whole pages of tokens and grow geometrically: appending costs one copy, amortised,
and attention reads one contiguous run of tokens per row and head. The pool only counts bytes. Old and new buffers
exist at the same time while a cache grows or is reordered; both are counted, so the budget is never exceeded.

States of fixed size (of convolutions and recurrences) are never changed in place: a step makes new ones, and those
before it are kept, so that a step can be taken back.

Letters in shapes: ``B`` rows, ``H`` key/value heads, ``C`` allocated tokens, ``L`` cached tokens, ``S`` new tokens,
``W`` head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from swarm_plugins.block_io import PAGE_TOKENS
from swarm_plugins.blocks.own_layers import OwnState
from swarm_plugins.errors import CapacityError, ConfigError


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

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one row."""
        width = self.key_heads * self.key_width + self.value_heads * self.value_width
        whole = self.slots * width * self.dtype.itemsize + self.index_width * self.index_dtype.itemsize
        # The states now, and those before the last step.
        return whole + 2 * self.grown_bytes

    @property
    def is_plain(self) -> bool:
        """Whether it is keys and values, and nothing else."""
        return self.key_heads > 0 and self.slots == 1 and not (self.index_width or self.row_bytes or self.grown_bytes)


class RewindError(ConfigError):
    """The states of a session cannot go back as far as is asked."""


States = dict[tuple[int, str, int], Tensor | OwnState]
"""By block, kind (``conv``, ``recurrent``, ``kept``, ``own``) and number: a block may have several of a kind."""


class KVPool:
    """Counts the bytes of all sessions against a budget."""

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 1:
            raise ConfigError(f"kv_bytes must be at least 1, got {budget_bytes}: give the KV cache some memory")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.on_reserve: Callable[[], None] | None = None
        """Called when bytes have been taken; what only uses what is left gives way then."""

    @property
    def free_bytes(self) -> int:
        """Unused bytes."""
        return self.budget_bytes - self.used_bytes

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
        if self.on_reserve is not None:
            self.on_reserve()

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
        # The states now, and those before the last step.
        self._row_bytes = 2 * sum(layout.row_bytes for layout in self._layouts.values())
        self._num_rows_kept = 0
        """Rows whose states are counted in the budget."""
        self.states: States = {}
        """Of all tokens up to ``length``."""
        self.new_states: States = {}
        """Of a step that is running; they count when it `advance`s."""
        self._before: tuple[int, States] | None = None
        """Length and states before the last step, or the one that runs."""
        # Without tokens, and so without memory.
        self._buffers = {
            block: self._moved(block, layout, 0, None, batch_size) for block, layout in self._layouts.items()
        }
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes taken from the budget."""
        return self.batch_size * self.capacity * self._token_bytes + self._num_rows_kept * self._row_bytes

    @property
    def has_states(self) -> bool:
        """Whether some block has states."""
        return any(layout.row_bytes or layout.grown_bytes for layout in self._layouts.values())

    def reserve(self, new_tokens: int, *, goes_on: bool = False) -> None:
        """Makes room for ``new_tokens`` more tokens per row, in all blocks at once.

        With ``goes_on`` they are a further part of the step before: states go back to before its first part.

        Raises:
            CapacityError: If the budget has no room; the cache is unchanged then.
            ConfigError: If the cache is closed.
        """
        self._check_open()
        self.new_states = {}
        if not goes_on:
            # Before new ones are made: there are two of each state, not three.
            self._before = (self.length, self.states)
        self._keep_rows(max(self.batch_size, self._num_rows_kept))
        needed = self.length + new_tokens
        if needed > self.capacity:
            ample = in_pages(max(needed, self.capacity + self.capacity // 2))
            # By half where there is plenty of room, so that others still find some; else by the minimum.
            self._move(ample if self._pool.fits(2 * self._cost(ample)) else in_pages(needed), None)

    @property
    def slots(self) -> int:
        """Keys and values that each block caches."""
        return max((layout.slots for layout in self._layouts.values()), default=1)

    def growth_bytes(self, rows: int, tokens: int) -> int:
        """Returns the bytes needed on top for so many tokens in so many rows, and while the cache grows."""
        states = max(0, rows - self._num_rows_kept) * self._row_bytes
        capacity = in_pages(tokens)
        return states + (self._cost(capacity, rows) if rows * capacity > self.batch_size * self.capacity else 0)

    def append(self, block: int, keys: Tensor, values: Tensor, slot: int = 0) -> None:
        """Writes ``[B, H, S, W]`` after the cached tokens of a block; they count when it `advance`s."""
        key_buffer, value_buffer = self._slot(block, slot)
        num_new = keys.shape[2]
        key_buffer.narrow(2, self.length, num_new).copy_(keys)
        value_buffer.narrow(2, self.length, num_new).copy_(values)

    def view(self, block: int, length: int, slot: int = 0) -> tuple[Tensor, Tensor]:
        """Returns the first ``length`` tokens of a block, ``[B, H, length, W]``, without a copy."""
        key_buffer, value_buffer = self._slot(block, slot)
        return key_buffer.narrow(2, 0, length), value_buffer.narrow(2, 0, length)

    def _slot(self, block: int, slot: int) -> tuple[Tensor, Tensor]:
        keys, values, _ = self._buffers[block]
        layout = self._layouts[block]
        if layout.slots == 1:
            return keys, values
        return (
            keys.narrow(1, slot * layout.key_heads, layout.key_heads),
            values.narrow(1, slot * layout.value_heads, layout.value_heads),
        )

    def append_index(self, block: int, keys: Tensor) -> Tensor:
        """Writes an indexer's keys, ``[B, S, W]``, as `append` does; returns all, ``[B, L + S, W]``."""
        buffer = self._buffers[block][2].narrow(2, 0, self.length + keys.shape[1])
        buffer.narrow(2, self.length, keys.shape[1]).copy_(keys[:, None])
        return buffer[:, 0]

    def advance(self, new_tokens: int) -> None:
        """Counts the tokens and states of a step."""
        if self.has_states:
            for state in self.new_states.values():
                if isinstance(state, OwnState):
                    state.compact()
            self.states, self.new_states = {**self.states, **self.new_states}, {}
        self.length += new_tokens

    def crop(self, length: int) -> None:
        """Keeps the first ``length`` tokens. The memory stays with the cache.

        Raises:
            RewindError: If states would have to go back further than to before the last step.
            ConfigError: If the cache is shorter, or closed.
        """
        self._check_open()
        if not 0 <= length <= self.length:
            raise ConfigError(f"cannot crop to {length} tokens: the cache holds {self.length}")
        if self.has_states and length < self.length:
            at, states = (0, {}) if length == 0 else self._before or (0, {})
            if at != length:
                raise RewindError(
                    f"cannot crop to {length} tokens of {self.length}: of blocks with states of fixed size, only "
                    f"the ones before the last step are kept, at {at} tokens"
                )
            self.states, self._before = states, None
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
            if self._num_rows_kept:
                self._keep_rows(max(len(rows), self._num_rows_kept))
            # Not with room for tokens that are gone: a crop leaves it, and other rows would multiply it.
            self._move(in_pages(self.length), rows)
            index = torch.tensor(rows, device=self._device)
            self.states = {key: state.index_select(0, index) for key, state in self.states.items()}
            self._before = None

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
            for new, old in zip(copy._buffers[block], self._buffers[block], strict=True):
                new.narrow(2, 0, self.length).copy_(old.narrow(2, 0, self.length))
        copy.length, copy.states, copy._before = self.length, self.states, self._before
        return copy

    def close(self) -> None:
        """Returns the memory to the budget. Idempotent."""
        if not self._is_closed:
            self._pool.release(self.num_bytes)
            self._is_closed = True
            self._buffers.clear()
            self.states, self.new_states, self._before = {}, {}, None
            self.capacity = self.length = self._num_rows_kept = 0

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("the session's cache is closed: open another session")

    def _keep_rows(self, num_rows: int) -> None:
        """Counts the states of so many rows in the budget."""
        if self._row_bytes and num_rows != self._num_rows_kept:
            self._pool.reserve((num_rows - self._num_rows_kept) * self._row_bytes)
            self._num_rows_kept = num_rows

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        def empty(heads: int, width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(num_rows, heads, capacity, width, dtype=dtype, device=self._device)

        buffers = (
            empty(layout.slots * layout.key_heads, layout.key_width, layout.dtype),
            empty(layout.slots * layout.value_heads, layout.value_width, layout.dtype),
            empty(min(1, layout.index_width), layout.index_width, layout.index_dtype),
        )
        if self.length:
            for new, whole in zip(buffers, self._buffers[block], strict=True):
                kept, old = new.narrow(2, 0, self.length), whole.narrow(2, 0, self.length)
                if rows is None:
                    kept.copy_(old)
                else:
                    for target, source in enumerate(rows):
                        kept[target].copy_(old[source])
        return buffers


def in_pages(tokens: int) -> int:
    """Returns the tokens that whole pages for so many hold."""
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS
