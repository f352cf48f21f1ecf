"""The cache lends the right bytes, within its budget, whatever is asked in whatever order."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from cache_kit import FakeStore, InvertedFormat, borrowed, content, make

from swarm_plugins.errors import CapacityError, SwarmError
from swarm_plugins.offload.cache.cache import BoundedCache


def test_experts_at_hand_come_first(cache: BoundedCache) -> None:
    borrowed(cache, 0, [2])
    assert next(iter(borrowed(cache, 0, [0, 1, 2]))) == 2


def test_more_experts_than_fit_stream_through(store: FakeStore) -> None:
    cache = make(store, num_fast=3)
    for layer in range(3):
        assert borrowed(cache, layer, range(4)) == {expert: store.expected(layer, expert) for expert in range(4)}
    cache.close()


def test_memory_never_exceeds_the_budget_under_random_use(store: FakeStore) -> None:
    cache = make(store, num_fast=5)
    pool = cache._slots._pool
    draw = random.Random(0)
    for _ in range(200):
        layer = draw.randrange(3)
        cache.guess((layer + 1) % 3, draw.sample(range(4), 2))
        for expert, views in cache.borrow(layer, draw.sample(range(4), draw.randint(1, 4))):
            assert content(views) == store.expected(layer, expert)
            assert pool.allocated_bytes <= pool.limit_bytes
    cache.close()


def test_layers_of_different_sizes_share_the_budget(tmp_path: Path) -> None:
    store = FakeStore(tmp_path, {0: 4, 5: 6}, {0: 1000, 5: 3000}).write()
    cache = make(store, fast_bytes=3 * store.stored_layout(5).num_bytes)
    for _ in range(3):
        for layer, count in store.num_experts.items():
            expected = {expert: store.expected(layer, expert) for expert in range(count)}
            assert borrowed(cache, layer, range(count)) == expected
    cache.close()


def test_stored_bytes_are_converted_where_the_format_says_so(store: FakeStore) -> None:
    cache = make(store, num_fast=3, kind=InvertedFormat)
    up = borrowed(cache, 0, [1])[1]["up"]
    assert up == bytes(255 - byte for byte in store.expected(0, 1)["up"])
    cache.close()


def test_what_is_lent_survives_the_reads_of_others(store: FakeStore) -> None:
    cache = make(store, num_fast=3, num_readers=2)
    lent = cache.borrow(0, [0])
    _, views = next(lent)
    for layer in (1, 2, 1):
        borrowed(cache, layer, range(4))
    assert content(views) == store.expected(0, 0)
    lent.close()
    cache.close()


def test_what_fits_is_read_once(store: FakeStore, cache: BoundedCache) -> None:
    for _ in range(5):
        borrowed(cache, 0, [0, 1])
        borrowed(cache, 1, [0, 3])
    stats = cache.stats()
    assert (stats.hits, stats.misses) == (16, 4)
    assert stats.bytes_read == 4 * 2 * store.tensor_bytes(0)
    assert stats.hit_ratio == 0.8


def test_too_small_a_budget_says_what_is_needed(store: FakeStore) -> None:
    size = store.stored_layout(0).num_bytes
    with pytest.raises(CapacityError, match=rf"fast_bytes is {2 * size}, but at least {3 * size} bytes are needed"):
        make(store, num_fast=2)


def test_memory_held_by_others_is_waited_for_and_then_reported(store: FakeStore) -> None:
    cache = make(store, num_fast=3)
    loans = [cache.borrow(0, [expert]) for expert in range(3)]
    for loan in loans:
        next(loan)
    usual = cache.config
    cache.config = replace(usual, read_timeout_s=1)
    with pytest.raises(CapacityError, match=r"no room for expert 3 of layer 0 .* raise fast_bytes"):
        borrowed(cache, 0, [3])
    cache.config = usual
    for loan in loans:
        loan.close()
    assert borrowed(cache, 0, [3]) == {3: store.expected(0, 3)}
    cache.close()


def test_threads_can_borrow_at_the_same_time(store: FakeStore) -> None:
    cache = make(store, num_fast=6)
    wrong: list[object] = []

    def use(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(50):
            layer, experts = draw.randrange(3), draw.sample(range(4), 2)
            if borrowed(cache, layer, experts) != {expert: store.expected(layer, expert) for expert in experts}:
                wrong.append((layer, experts))

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    cache.close()


def test_a_closed_cache_refuses_and_closes_again(store: FakeStore, cache: BoundedCache) -> None:
    borrowed(cache, 0, [0])
    cache.close()
    cache.close()
    with pytest.raises(SwarmError, match="closed"):
        borrowed(cache, 0, [0])
