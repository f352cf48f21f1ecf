"""Keys, values and other states of sessions, under one budget in bytes.

A cache's buffers are allocated in whole pages of tokens and grow geometrically: appending costs one copy, amortised,
and attention reads one contiguous run of tokens per row and head. The pool only counts bytes. Old and new buffers
exist at the same time while a cache grows or is reordered; both are counted, so the budget is never exceeded.

Blocks with a sliding window keep what later tokens see, and `ROLLBACK_TOKENS` before that. The pages before are freed
when the next step asks for room: until then, the step before can be taken back, and its pages be copied.

States of fixed size (of convolutions and recurrences) are never changed in place: a step makes new ones, and those
before it are kept, so that a step can be taken back.

Letters in shapes: ``B`` rows, ``H`` key/value heads, ``C`` allocated tokens, ``L`` cached tokens, ``S`` new tokens,
``W`` head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from swarm_plugins.block_io import in_pages
from swarm_plugins.blocks.kept import Kept, Move
from swarm_plugins.blocks.layout import BlockKV
from swarm_plugins.blocks.own_layers import OwnState
from swarm_plugins.errors import CapacityError, ConfigError


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
        self.promised: Callable[[], int] = lambda: 0
        """Returns how many bytes admitted steps will still need; spare capacity leaves them free."""

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
        self._pool = pool
        self._device = device
        self._layouts = {block: layouts[block] for block in blocks if block in layouts}
        self.batch_size = batch_size
        windows = {layout.window for layout in self._layouts.values()}
        # The smallest first: 0, of blocks that keep all tokens.
        self._kept = [Kept(self._with(window), window, batch_size, device) for window in sorted(windows)]
        self._of = {block: kept for kept in self._kept for block in kept.layouts}
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
        self._is_closed = False

    def _with(self, window: int) -> dict[int, BlockKV]:
        return {block: layout for block, layout in self._layouts.items() if layout.window == window}

    @property
    def capacity(self) -> int:
        """Allocated tokens of a row, in blocks that keep all of them if there are any."""
        return self._kept[0].capacity if self._kept else 0

    @property
    def num_bytes(self) -> int:
        """Bytes taken from the budget."""
        tokens = sum(kept.capacity * kept.token_bytes for kept in self._kept)
        return self.batch_size * tokens + self._num_rows_kept * self._row_bytes

    @property
    def copy_bytes(self) -> int:
        """Bytes that a copy takes."""
        tokens = sum((in_pages(self.length) - kept.first) * kept.token_bytes for kept in self._kept)
        return self.batch_size * (tokens + self._row_bytes)

    @property
    def has_states(self) -> bool:
        """Whether some block has states."""
        return any(layout.has_states for layout in self._layouts.values())

    @property
    def is_windowed(self) -> bool:
        """Whether some block keeps a window."""
        return any(kept.window for kept in self._kept)

    def keeps_window(self, block: int) -> bool:
        """Returns whether a block keeps a window."""
        return block in self._of and self._of[block].window > 0

    def first(self, block: int) -> int:
        """Returns the first token that a block still has."""
        kept = self._of.get(block)
        return 0 if kept is None else kept.first

    def reserve(self, new_tokens: int, *, goes_on: bool = False, to_come: int = 0) -> None:
        """Makes room for ``new_tokens`` more tokens per row, in all blocks at once; frees what has left a window.

        With ``goes_on`` they are a further part of the step before: states go back to before its first part. Buffers
        that move get room for the ``to_come`` tokens behind them, too: they would be copied again and again.

        Raises:
            CapacityError: If the budget has no room; the cache is unchanged then.
            ConfigError: If the cache is closed.
        """
        self._check_open()
        # Before others are made: there are two of each state, not three.
        self.new_states = {}
        self._make_room(new_tokens, to_come)
        if not goes_on:
            self._before = (self.length, self.states)

    def _make_room(self, new_tokens: int, to_come: int) -> None:
        self._keep_rows(max(self.batch_size, self._num_rows_kept))
        needed = self.length + new_tokens
        due = [kept for kept in self._kept if kept.is_due(self.length, needed)]
        if not due:
            return
        least = [Move(kept, *kept.place_for(self.length, needed, to_come)) for kept in due]
        ample = [move._replace(capacity=move.kept.ample(move.capacity)) for move in least]
        # By half where there is plenty of room, so that others still find some; else by the minimum.
        moves = ample if self._pool.fits(2 * self._cost(ample) + self._pool.promised()) else least
        if not self._pool.fits(self._cost(moves)):
            # Those that would only free memory can wait.
            moves = [move for move in least if needed - move.kept.first > move.kept.capacity]
        self._move(moves, None)

    @property
    def slots(self) -> int:
        """Keys and values that each block caches."""
        return max((layout.slots for layout in self._layouts.values()), default=1)

    def growth_bytes(self, rows: int, tokens: int, new_tokens: int, *, selects: bool = False) -> int:
        """Returns the bytes needed on top for so many tokens in so many rows, and while the cache grows.

        Args:
            rows: Rows then.
            tokens: Tokens of each then.
            new_tokens: How many of them are new.
            selects: Whether rows are selected before, which moves all buffers.
        """
        states = max(0, rows - self._num_rows_kept) * self._row_bytes
        moves = [Move(kept, *kept.place_for(tokens - new_tokens, tokens)) for kept in self._kept]
        growing = [
            move
            for move in moves
            if selects
            or rows * move.capacity > self.batch_size * move.kept.capacity
            or (tokens > new_tokens and tokens - move.kept.first > move.kept.capacity)
        ]
        return states + self._cost(growing, rows)

    def append(self, block: int, keys: Tensor, values: Tensor, slot: int = 0) -> None:
        """Writes ``[B, H, S, W]`` after the cached tokens of a block; they count when it `advance`s."""
        kept, layout = self._of[block], self._layouts[block]
        start = self.length - kept.first
        key_buffer, value_buffer, _ = kept.buffers[block]
        key_buffer.write(start, keys, slot * layout.key_heads)
        value_buffer.write(start, values, slot * layout.value_heads)

    def view(self, block: int, length: int, slot: int = 0) -> tuple[Tensor, Tensor]:
        """Returns what a block has of the first ``length`` tokens, ``[B, H, length - first, W]``.

        Without a copy, if they are kept as wide as they are computed.
        """
        kept, layout = self._of[block], self._layouts[block]
        key_buffer, value_buffer, _ = kept.buffers[block]
        num_tokens = length - kept.first
        return (
            key_buffer.read(0, num_tokens, slot * layout.key_heads, layout.key_heads),
            value_buffer.read(0, num_tokens, slot * layout.value_heads, layout.value_heads),
        )

    def append_index(self, block: int, keys: Tensor) -> Tensor:
        """Writes an indexer's keys, ``[B, S, W]``, as `append` does; returns all, ``[B, L + S, W]``."""
        kept = self._of[block]
        buffer, start = kept.buffers[block][2], self.length - kept.first
        buffer.write(start, keys[:, None])
        return buffer.read(0, start + keys.shape[1], 0, 1)[:, 0]

    def stored(self, block: int, start: int, num_tokens: int) -> list[Tensor] | None:
        """Returns keys and values as they are kept, ``[B, H, num_tokens, ...]``, without a copy; None if they are gone.

        `append_stored` takes copies of them, in a cache of the same layout.
        """
        kept = self._of[block]
        if start < kept.first:
            return None
        tensors = (tensor for buffer in kept.buffers[block][:2] for tensor in buffer.tensors)
        return [tensor.narrow(2, start - kept.first, num_tokens) for tensor in tensors]

    def append_stored(self, block: int, tensors: Sequence[Tensor]) -> None:
        """Writes what `stored` has returned after the cached tokens; they count when it `advance`s."""
        kept = self._of[block]
        targets = (tensor for buffer in kept.buffers[block][:2] for tensor in buffer.tensors)
        for target, tensor in zip(targets, tensors, strict=True):
            target.narrow(2, self.length - kept.first, tensor.shape[2]).copy_(tensor)

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
            RewindError: If states would have to go back further than to before the last step, or a window further than
                to `ROLLBACK_TOKENS` before it.
            ConfigError: If the cache is shorter, or closed.
        """
        self._check_open()
        if not 0 <= length <= self.length:
            raise ConfigError(f"cannot crop to {length} tokens: the cache holds {self.length}")
        if length == self.length:
            return
        gone = next((kept for kept in self._kept if length and not kept.can_go_back(length)), None)
        if gone is not None:
            raise RewindError(
                f"cannot crop to {length} tokens of {self.length}: blocks with a window of {gone.window} tokens have "
                f"freed those before {gone.first}"
            )
        if self.has_states:
            at, states = (0, {}) if length == 0 else self._before or (0, {})
            if at != length:
                raise RewindError(
                    f"cannot crop to {length} tokens of {self.length}: of blocks with states of fixed size, only "
                    f"the ones before the last step are kept, at {at} tokens"
                )
            self.states, self._before = states, None
        self.length = length
        for kept in self._kept if length == 0 else ():
            kept.first = 0

    def select(self, indices: Sequence[int], new_tokens: int = 0) -> None:
        """Makes row ``i`` the old row ``indices[i]``, with room for new tokens.

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
            needed = self.length + new_tokens
            self._move([Move(kept, *kept.place_for(self.length, needed)) for kept in self._kept], rows)
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
        for new, old in zip(copy._kept, self._kept, strict=True):
            new.first = old.first
        copy.length = self.length
        try:
            copy.reserve(0)
        except CapacityError:
            copy.close()
            raise
        for new, old in zip(copy._kept, self._kept, strict=True):
            for block, buffers in old.buffers.items():
                for target, source in zip(new.buffers[block], buffers, strict=True):
                    target.take(source, new.first - old.first, self.length - new.first)
        copy.states, copy._before = self.states, self._before
        return copy

    def close(self) -> None:
        """Returns the memory to the budget. Idempotent."""
        if not self._is_closed:
            self._pool.release(self.num_bytes)
            self._is_closed = True
            self._kept, self._of = [], {}
            self.states, self.new_states, self._before = {}, {}, None
            self.length = self._num_rows_kept = 0

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("the session's cache is closed: open another session")

    def _keep_rows(self, num_rows: int) -> None:
        """Counts the states of so many rows in the budget."""
        if self._row_bytes and num_rows != self._num_rows_kept:
            self._pool.reserve((num_rows - self._num_rows_kept) * self._row_bytes)
            self._num_rows_kept = num_rows

    def _cost(self, moves: Sequence[Move], num_rows: int | None = None) -> int:
        """Bytes needed on top to move, while the largest block has both its old and new buffers."""
        rows = self.batch_size if num_rows is None else num_rows
        # Blocks move one by one: the peak is at the last when growing, at the first when shrinking.
        growth = beside = 0
        for move in moves:
            old, new = self.batch_size * move.kept.capacity, rows * move.capacity
            growth += max(new - old, 0) * move.kept.token_bytes
            beside = max(beside, move.kept.largest * min(old, new))
        return growth + beside

    def _move(self, moves: Sequence[Move], rows: list[int] | None) -> None:
        """Re-allocates buffers and, if given, for other rows: then those of all blocks."""
        num_rows = self.batch_size if rows is None else len(rows)
        cost = self._cost(moves, num_rows)
        self._pool.reserve(cost)
        before = self.num_bytes
        try:
            for kept, first, capacity in moves:
                for block in kept.layouts:
                    kept.buffers[block] = kept.moved(block, self.length, first, capacity, rows, num_rows)
        except BaseException:
            # Out of real memory half-way: the buffers differ in shape now, so the cache is unusable.
            self._pool.release(cost)
            self.close()
            raise
        for kept, first, capacity in moves:
            kept.first, kept.capacity = first, capacity
        self.batch_size = num_rows
        self._pool.release(cost - (self.num_bytes - before))
