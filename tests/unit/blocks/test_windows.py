"""Blocks with a sliding window keep it and no more: outputs equal HF's sliding cache, and memory stops growing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch
from blocks_kit import BLOCKS, WIDTH, Pair, base, run_local, states
from torch import Tensor
from transformers import DynamicCache

from swarm_plugins.block_io import PAGE_TOKENS, ROLLBACK_TOKENS, kept_by_window
from swarm_plugins.blocks import KVCache, StepInputs
from swarm_plugins.blocks.kv import KVPool, RewindError
from swarm_plugins.blocks.layout import BlockKV, SessionBytes
from swarm_plugins.errors import CapacityError

# HF's cache drops other tokens than ours, which changes the order of sums.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
WINDOW = 8
"""Of the toys."""
KEPT = kept_by_window(WINDOW)
PART = {"mixtral_sliding": 4, "gpt_oss": 2, "gemma2": 2}
"""How many of the four blocks have a window."""
ROW_BYTES = 2 * 2 * 8 * 4
"""Keys and values of a token in one block: heads times width, float32."""


@pytest.fixture(params=PART)
def pair(request: pytest.FixtureRequest, pair_of: Callable[[str], Pair]) -> Iterator[Pair]:
    pair = pair_of(request.param)
    yield pair
    assert pair.span.pool.used_bytes == 0, "a test left a session open"


def sizes(*cuts: int) -> list[tuple[int, int]]:
    """Beginnings and ends of steps, single tokens from the last cut to 330."""
    ends = [*cuts, *range(cuts[-1] + 1, 331)]
    return list(zip([0, *ends], ends, strict=False))


@torch.no_grad()
def expected(pair: Pair, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
    """What the local model gives for all tokens at once."""
    kwargs = {}
    if mask is not None:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        kwargs = {"attention_mask": mask.long(), "position_ids": positions}
    return run_local(pair.local, hidden, DynamicCache(config=base(pair.local).config), **kwargs)


def test_decoding_far_beyond_the_window_equals_the_local_model_in_flat_memory(pair: Pair) -> None:
    hidden = states(1, 330, WIDTH)
    wanted = expected(pair, hidden)
    held = []
    with closing(pair.span.new_cache(1, BLOCKS)) as session:
        for start, end in sizes(150, 220):
            torch.testing.assert_close(pair.step(session, hidden[:, start:end]), wanted[:, start:end], **CLOSE)
            whole = (len(BLOCKS) - PART[pair.family]) * session.capacity
            held.append(session.num_bytes // ROW_BYTES - whole * bool(PART[pair.family] < 4))
    # The pages of a prompt are there until the first single token comes.
    assert held[0] // PART[pair.family] >= 150
    assert max(held[2:]) <= PART[pair.family] * KEPT
    # And the prompt's second part has freed what the first had left.
    assert held[1] < PART[pair.family] * (220 + PAGE_TOKENS)


def test_packed_sessions_of_different_lengths_equal_the_local_model(pair: Pair) -> None:
    hidden, other = states(1, 330, WIDTH), states(2, 330, WIDTH, seed=1)
    wanted, wanted_other = expected(pair, hidden), expected(pair, other)
    with closing(pair.span.new_cache(1, BLOCKS)) as one, closing(pair.span.new_cache(2, BLOCKS)) as two:
        pair.step(one, hidden[:, :200])
        pair.step(two, other[:, :30])
        for index in range(120):
            places = (200 + index, 30 + index)
            steps = [
                StepInputs(cache=cache, blocks=BLOCKS, hidden=whole[:, place : place + 1])
                for cache, whole, place in zip((one, two), (hidden, other), places, strict=True)
            ]
            found = pair.span.step(steps)
            torch.testing.assert_close(found[0].hidden, wanted[:, places[0] : places[0] + 1], **CLOSE)
            torch.testing.assert_close(found[1].hidden, wanted_other[:, places[1] : places[1] + 1], **CLOSE)
        assert one.first(first_windowed(one)) > 0


def test_padded_rows_beyond_the_window_equal_the_local_model(pair: Pair) -> None:
    hidden, mask = states(2, 330, WIDTH), torch.ones(2, 330, dtype=torch.bool)
    mask[1, :90] = False
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    wanted = expected(pair, hidden, mask)
    with closing(pair.span.new_cache(2, BLOCKS)) as session:
        for start, end in sizes(100, 300):
            ours = pair.step(
                session, hidden[:, start:end], attention_mask=mask[:, :end], position_ids=positions[:, start:end]
            )
            real = mask[:, start:end]
            torch.testing.assert_close(ours[real], wanted[:, start:end][real], **CLOSE)


def first_windowed(session: KVCache) -> int:
    return next(block for block in BLOCKS if session.keeps_window(block))


def test_a_draft_is_taken_back_and_what_has_left_the_window_is_not(pair: Pair) -> None:
    hidden, draft = states(1, 330, WIDTH), states(1, 70, WIDTH, seed=2)
    wanted = expected(pair, hidden)
    with closing(pair.span.new_cache(1, BLOCKS)) as session:
        for start, end in ((0, 250), (250, 320)):
            pair.step(session, hidden[:, start:end])
        pair.step(session, draft)
        session.crop(320)
        session.crop(320 - ROLLBACK_TOKENS)
        at = session.length
        ours = pair.step(session, hidden[:, at:])
        torch.testing.assert_close(ours, wanted[:, at:], **CLOSE)
        with pytest.raises(RewindError, match=f"to 100 tokens of 330: blocks with a window of {WINDOW} tokens have fr"):
            session.crop(100)
        assert session.length == 330
        session.crop(0)
        torch.testing.assert_close(pair.step(session, hidden[:, :50]), wanted[:, :50], **CLOSE)


def test_rows_are_selected_and_forked_beyond_the_window(pair: Pair) -> None:
    hidden = states(2, 330, WIDTH)
    wanted = expected(pair, hidden)
    with closing(pair.span.new_cache(2, BLOCKS)) as session:
        for start, end in ((0, 250), (250, 329)):
            pair.step(session, hidden[:, start:end])
        asked = session.copy_bytes
        before = pair.span.pool.used_bytes
        with closing(session.fork()) as fork:
            assert fork.num_bytes <= asked
            assert pair.span.pool.used_bytes == before + fork.num_bytes
            fork.select([1, 0, 1])
            ours = pair.step(fork, hidden[[1, 0, 1], 329:])
            torch.testing.assert_close(ours, wanted[[1, 0, 1], 329:], **CLOSE)
        torch.testing.assert_close(pair.step(session, hidden[:, 329:]), wanted[:, 329:], **CLOSE)


LAYOUTS = {0: BlockKV(1, 4, 1, 4, torch.float32), 1: BlockKV(1, 4, 1, 4, torch.float32, window=70)}
TOKEN_BYTES = LAYOUTS[0].token_bytes


@pytest.mark.parametrize("layouts", [LAYOUTS, {1: LAYOUTS[1]}], ids=["both", "windows only"])
def test_memory_that_is_promised_is_enough_for_single_tokens(layouts: dict[int, BlockKV]) -> None:
    """A budget for so many tokens, and a block's old buffers beside its new ones, holds a session of that length."""
    tokens = 1000
    known = SessionBytes.of(layouts.values())
    beside = max(tokens if 0 in layouts else 0, known.window_tokens) * TOKEN_BYTES
    needed = next(size for size in range(0, 1 << 20, 64) if known.tokens_in(size) >= tokens)
    pool = KVPool(needed + beside)
    cache = KVCache(pool, layouts, range(2), 1, torch.device("cpu"))
    for _ in range(tokens):
        assert cache.num_bytes + cache.growth_bytes(1, cache.length + 1, 1) <= pool.budget_bytes
        cache.reserve(1)
        cache.advance(1)
    assert cache.num_bytes <= needed + PAGE_TOKENS * TOKEN_BYTES
    cache.close()
    assert pool.used_bytes == 0


def test_where_nothing_fits_beside_pages_are_freed_later() -> None:
    pool = KVPool(1 << 20)
    cache = KVCache(pool, {1: LAYOUTS[1]}, range(2), 1, torch.device("cpu"))
    cache.reserve(990)
    cache.advance(990)
    held, pool.budget_bytes = cache.num_bytes, cache.num_bytes
    cache.reserve(1)
    assert cache.num_bytes == held
    cache.advance(cache.capacity - 990)
    with pytest.raises(CapacityError):
        cache.reserve(1)
    pool.budget_bytes = 1 << 20
    cache.reserve(1)
    assert cache.num_bytes < held // 2
    cache.close()
