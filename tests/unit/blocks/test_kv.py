"""The budget of keys and values: whole pages, never exceeded, nothing lost when it is full."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_plugins.block_io import PAGE_TOKENS
from swarm_plugins.blocks.kv import KVCache, KVPool
from swarm_plugins.blocks.layout import BlockKV, SessionBytes
from swarm_plugins.blocks.runner import SpanSpec
from swarm_plugins.errors import CapacityError, ConfigError

LAYOUTS = {0: BlockKV(2, 3, 2, 3, torch.float32), 2: BlockKV(1, 8, 1, 4, torch.float16)}
TOKEN_BYTES = (2 * 3 * 2) * 4 + (8 + 4) * 2
LAYOUT = LAYOUTS[0]
NOTHING = BlockKV(0, 0, 0, 0, torch.float32)
STATES = NOTHING._replace(row_bytes=1000)


def session_of(pool: KVPool, rows: int = 1) -> KVCache:
    return KVCache(pool, LAYOUTS, range(3), rows, torch.device("cpu"))


def fill(session: KVCache, tokens: int, start: float = 0.0) -> None:
    """Appends tokens whose keys are counted up from ``start`` in every row."""
    session.reserve(tokens)
    for block, layout in LAYOUTS.items():
        numbers = start + torch.arange(tokens, dtype=layout.dtype).reshape(1, 1, tokens, 1)
        rows = torch.arange(session.batch_size, dtype=layout.dtype).reshape(-1, 1, 1, 1) * 1000
        keys = (numbers + rows).expand(-1, layout.key_heads, -1, layout.key_width)
        values = (numbers + rows).expand(-1, layout.value_heads, -1, layout.value_width)
        session.append(block, keys, values)
    session.length += tokens


def held(session: KVCache) -> list[list[float]]:
    """The numbers in each row of the first block."""
    keys, values = session.view(0, session.length)
    assert torch.equal(keys, values)
    return keys[:, 1, :, 2].tolist()


def test_sessions_take_whole_pages() -> None:
    pool = KVPool(1 << 20)
    session = session_of(pool, rows=2)
    assert pool.used_bytes == session.num_bytes == 0
    fill(session, PAGE_TOKENS)
    assert pool.used_bytes == 2 * PAGE_TOKENS * TOKEN_BYTES
    fill(session, 1, PAGE_TOKENS)
    assert pool.used_bytes == session.num_bytes == 2 * 2 * PAGE_TOKENS * TOKEN_BYTES
    assert held(session)[1] == [1000.0 + number for number in range(PAGE_TOKENS + 1)]


def test_room_for_tokens_that_are_gone_is_not_multiplied_by_rows() -> None:
    pool = KVPool(1 << 24)
    session = session_of(pool)
    fill(session, 10 * PAGE_TOKENS)
    session.crop(1)
    asked = session.growth_bytes(100, 2, 1)
    before = session.num_bytes
    session.select([0] * 100)
    session.reserve(1)
    assert session.num_bytes == 100 * PAGE_TOKENS * TOKEN_BYTES <= before + asked


def test_a_block_with_two_attentions_keeps_both_apart() -> None:
    layout = BlockKV(2, 3, 1, 4, torch.float32, slots=2)
    assert layout.token_bytes == 2 * LAYOUT._replace(value_heads=1, value_width=4).token_bytes
    assert not layout.is_plain
    session = KVCache(KVPool(1 << 20), {5: layout}, range(5, 6), 1, torch.device("cpu"))
    first, second = torch.rand(2, 1, 2, 4, 3), torch.rand(2, 1, 1, 4, 4)
    session.reserve(4)
    for slot in (0, 1):
        session.append(5, first[slot], second[slot], slot)
    session.length = 4
    session.select([0, 0])
    for slot in (0, 1):
        keys, values = session.view(5, 4, slot)
        assert torch.equal(keys, first[slot].expand(2, -1, -1, -1))
        assert torch.equal(values, second[slot].expand(2, -1, -1, -1))


def test_growth_is_geometric_where_there_is_room_and_exact_where_not() -> None:
    roomy = session_of(KVPool(1 << 30))
    fill(roomy, 8 * PAGE_TOKENS)
    fill(roomy, 1)
    assert roomy.capacity == 12 * PAGE_TOKENS
    tight = session_of(KVPool(10 * PAGE_TOKENS * TOKEN_BYTES + 9 * PAGE_TOKENS * 48))
    fill(tight, 8 * PAGE_TOKENS)
    fill(tight, 1)
    assert tight.capacity == 9 * PAGE_TOKENS


def test_moving_to_larger_buffers_is_counted_too() -> None:
    """One page of both blocks fits twice, but not while the larger block's old buffers are still there."""
    pool = KVPool(2 * PAGE_TOKENS * TOKEN_BYTES)
    session = session_of(pool)
    session.reserve(1)
    with pytest.raises(CapacityError, match=rf"{PAGE_TOKENS * TOKEN_BYTES} bytes used"):
        session.reserve(PAGE_TOKENS + 1)
    assert pool.used_bytes == session.num_bytes == PAGE_TOKENS * TOKEN_BYTES
    assert session.capacity == PAGE_TOKENS


def test_no_room_for_a_first_page_says_used_asked_and_limit() -> None:
    pool = KVPool(100)
    asked = PAGE_TOKENS * TOKEN_BYTES
    with pytest.raises(CapacityError, match=rf"0 bytes used, {asked} more asked, limit 100"):
        session_of(pool).reserve(1)
    assert pool.used_bytes == 0


def test_rows_are_selected_repeated_and_forked() -> None:
    pool = KVPool(1 << 20)
    session = session_of(pool, rows=2)
    fill(session, 3)
    session.select([0, 0, 1, 1])
    assert held(session) == [[0, 1, 2], [0, 1, 2], [1000, 1001, 1002], [1000, 1001, 1002]]
    assert pool.used_bytes == session.num_bytes == 4 * PAGE_TOKENS * TOKEN_BYTES
    session.select([3, 0])
    assert held(session) == [[1000, 1001, 1002], [0, 1, 2]]
    assert pool.used_bytes == session.num_bytes == 2 * PAGE_TOKENS * TOKEN_BYTES
    copy = session.fork()
    session.crop(1)
    fill(session, 1, 7)
    assert held(copy) == [[1000, 1001, 1002], [0, 1, 2]]
    assert held(session) == [[1000, 7], [0, 1007]]
    for one in (session, copy):
        one.close()
        one.close()
    assert pool.used_bytes == 0


def test_failed_select_and_fork_leave_everything_as_it_was() -> None:
    pool = KVPool(3 * PAGE_TOKENS * TOKEN_BYTES)
    session = session_of(pool, rows=2)
    fill(session, 3)
    for change in (lambda: session.select([0, 0, 1, 1]), session.fork):
        with pytest.raises(CapacityError):
            change()
        assert session.batch_size == 2
        assert held(session) == [[0, 1, 2], [1000, 1001, 1002]]
        assert pool.used_bytes == session.num_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda session: session.crop(4), r"cannot crop to 4 tokens: the cache holds 3", id="crop"),
        pytest.param(lambda session: session.crop(-1), r"cannot crop to -1", id="crop-negative"),
        pytest.param(lambda session: session.select([0, 2]), r"row index 2 .* has 2 rows", id="select"),
        pytest.param(lambda session: session.select([-1]), r"row index -1", id="select-negative"),
        pytest.param(lambda session: session.select([]), r"at least one row index", id="select-none"),
    ],
)
def test_wrong_changes_are_refused(change: Callable[[KVCache], Any], message: str) -> None:
    session = session_of(KVPool(1 << 20), rows=2)
    fill(session, 3)
    with pytest.raises(ConfigError, match=message):
        change(session)
    assert held(session) == [[0, 1, 2], [1000, 1001, 1002]]


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_bytes must be at least 1, got 0"):
        KVPool(0)
    with pytest.raises(ConfigError, match="batch_size must be at least 1, got 0"):
        session_of(KVPool(1 << 20), rows=0)


@pytest.mark.parametrize(
    ("layouts", "num_bytes", "expected"),
    [
        pytest.param([LAYOUT] * 2, 6 * PAGE_TOKENS * LAYOUT.token_bytes - 1, 2 * PAGE_TOKENS, id="whole pages"),
        pytest.param([LAYOUT, STATES], 2000 + PAGE_TOKENS * LAYOUT.token_bytes, PAGE_TOKENS, id="states first"),
        pytest.param([LAYOUT, STATES], 1999, 0, id="no row"),
        pytest.param([STATES], 4500, 2 * 512, id="states only"),
        pytest.param([NOTHING], 1 << 30, 1 << 30, id="nothing is kept"),
    ],
)
def test_tokens_that_memory_has_room_for(layouts: list[BlockKV], num_bytes: int, expected: int) -> None:
    assert spec_of(layouts).kv_tokens(num_bytes) == expected


@pytest.mark.parametrize(
    ("layouts", "expected"),
    [
        pytest.param([LAYOUT], 0, id="no states"),
        # 2000 bytes of states, 48 of keys and values.
        pytest.param([LAYOUT, STATES], 42, id="states"),
        pytest.param([STATES], 512, id="states only"),
        pytest.param([NOTHING], 0, id="nothing is kept"),
    ],
)
def test_rows_after_the_first_take_no_less_than_their_states(layouts: list[BlockKV], expected: int) -> None:
    spec, num_rows = spec_of(layouts), 3
    assert spec.kv_row_tokens == expected
    # Announced room for as many rows, of one page each, is room for them.
    pool = KVPool(1 << 20)
    needed = num_rows * PAGE_TOKENS + (num_rows - 1) * spec.kv_row_tokens
    pool.used_bytes = next(used for used in range(1 << 20, 0, -64) if spec.kv_tokens((1 << 20) - used) >= needed)
    cache = KVCache(pool, spec.kv_layouts, spec.blocks, num_rows, spec.device)
    cache.reserve(1)
    cache.close()


@pytest.mark.parametrize("tokens", [1, 70, 200])
def test_growth_is_known_before(tokens: int) -> None:
    layouts = {**LAYOUTS, 3: STATES}
    for missing in (0, 1):
        pool = KVPool(1 << 20)
        cache = KVCache(pool, layouts, range(4), 3, torch.device("cpu"))
        for num_tokens in (tokens, 3 * tokens):
            pool.budget_bytes = pool.used_bytes + cache.growth_bytes(3, cache.length + num_tokens, num_tokens)
            cache.reserve(num_tokens)
        assert cache.growth_bytes(3, 3 * tokens, tokens) == cache.growth_bytes(2, 1, 1) == 0
        pool.budget_bytes = pool.used_bytes + cache.growth_bytes(3, 1000, 1000) - missing
        with pytest.raises(CapacityError) if missing else contextlib.nullcontext():
            cache.reserve(1000)


def test_growth_with_rows_in_another_order_is_known_before() -> None:
    for missing in (0, 1):
        pool = KVPool(1 << 20)
        cache = session_of(pool, rows=3)
        fill(cache, 100)
        asked = cache.growth_bytes(3, 101, 1, selects=True)
        pool.budget_bytes = pool.used_bytes + asked - missing
        with pytest.raises(CapacityError) if missing else contextlib.nullcontext():
            cache.select([1, 0, 2], 1)
            cache.reserve(1)


def test_a_step_without_room_leaves_the_states_before_the_last_one() -> None:
    pool = KVPool(1 << 20)
    cache = KVCache(pool, {**LAYOUTS, 3: STATES}, range(4), 1, torch.device("cpu"))
    for number in (1, 2):
        cache.reserve(1)
        cache.new_states[3, "conv", 0] = torch.tensor([number])
        cache.advance(1)
    pool.budget_bytes = pool.used_bytes
    with pytest.raises(CapacityError):
        cache.reserve(PAGE_TOKENS)
    cache.crop(1)
    assert cache.states[3, "conv", 0] == torch.tensor([1])


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_a_session_can_grow_to_what_is_promised(num_blocks: int) -> None:
    """Token by token, or with one prompt in chunks, to which nothing but its own pages has been promised."""
    layouts = dict.fromkeys(range(num_blocks), LAYOUT)
    pool = KVPool(20 * PAGE_TOKENS * num_blocks * LAYOUT.token_bytes)
    tokens = SessionBytes.of(layouts.values()).pages_in(pool.budget_bytes)
    assert tokens == PAGE_TOKENS * {1: 10, 2: 13, 4: 16}[num_blocks]
    for size in (1, 4 * PAGE_TOKENS):
        cache = KVCache(pool, layouts, range(num_blocks), 1, torch.device("cpu"))
        if size > 1:
            pool.budget_bytes = cache.growth_bytes(1, tokens, tokens)
        while cache.length < tokens:
            new = min(size, tokens - cache.length)
            cache.reserve(new, goes_on=size > 1, to_come=tokens - cache.length - new if size > 1 else 0)
            cache.advance(new)
        cache.close()


def spec_of(layouts: list[BlockKV]) -> SpanSpec:
    return SpanSpec(
        blocks=range(len(layouts)),
        hidden_size=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_positions=512,
        kv_layouts=dict(enumerate(layouts)),
    )


class Watching(KVPool):
    """Notes the most that was ever used."""

    peak = 0

    def reserve(self, num_bytes: int) -> None:
        super().reserve(num_bytes)
        self.peak = max(self.peak, self.used_bytes)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 150)),
        st.tuples(st.just("repeat"), st.integers(1, 3)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 5), min_size=1, max_size=4)),
        st.tuples(st.just("crop"), st.integers(0, 200)),
        st.tuples(st.just("fork"), st.just(0)),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS, pages=st.integers(1, 12))
def test_any_sequence_of_changes_keeps_contents_and_budget(operations: list[tuple[str, Any]], pages: int) -> None:
    pool = Watching(pages * PAGE_TOKENS * TOKEN_BYTES)
    session = session_of(pool)
    model: list[list[float]] = [[]]
    forks = []
    for kind, argument in operations:
        try:
            if kind == "append":
                fill(session, argument, float(len(model[0])))
                model = [
                    [*row, *(len(row) + i + 1000 * index for i in range(argument))] for index, row in enumerate(model)
                ]
            elif kind == "repeat":
                session.select([row for row in range(len(model)) for _ in range(argument)])
                model = [row for row in model for _ in range(argument)]
            elif kind == "select":
                rows = [index % len(model) for index in argument]
                session.select(rows)
                model = [list(model[row]) for row in rows]
            elif kind == "crop":
                session.crop(min(argument, session.length))
                model = [row[:argument] for row in model]
            else:
                forks.append((session.fork(), [list(row) for row in model]))
        except CapacityError:
            pass
        assert held(session) == model
        assert pool.used_bytes == session.num_bytes + sum(fork.num_bytes for fork, _ in forks)
    for fork, expected in forks:
        assert held(fork) == expected
        fork.close()
    session.close()
    assert pool.used_bytes == 0
    assert pool.peak <= pool.budget_bytes
