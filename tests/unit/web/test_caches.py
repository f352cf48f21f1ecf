"""Caches of conversations: the right one is found, and there are never more than allowed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swarm_plugins.testing import tiny_model
from swarm_plugins.web.engine.caches import CacheStore
from swarm_plugins.web.engine.engine import _token_bytes


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def store(clock: Clock | None = None, **bounds: Any) -> CacheStore:
    chosen = {"max_caches": 8, "max_bytes": 1000, "max_age_s": 10.0, "token_bytes": 1, **bounds}
    return CacheStore(clock=clock or Clock(), **chosen)


class Cache:
    """Can be cropped as transformers' caches can."""

    def __init__(self, length: int, *, is_croppable: bool = True) -> None:
        self.length = length
        self.layers = [SimpleNamespace(is_croppable=is_croppable)]

    def crop(self, length: int) -> None:
        assert length < 0
        self.length += length


def text(first: int, length: int) -> list[int]:
    return list(range(first, first + length))


def test_the_longest_beginning_is_found_and_cut_to_what_is_shared() -> None:
    caches, short, long = store(), Cache(20), Cache(40)
    caches.put("k", text(0, 20), short)
    caches.put("k", text(0, 40), long)
    found, shared = caches.take("k", [*text(0, 30), 999, 999])
    assert (found, shared, long.length) == (long, 30, 30)
    assert caches.take("k", text(0, 100)) == (short, 20)
    assert caches.take("k", text(0, 100)) == (None, 0)


def test_the_last_token_is_never_cached_since_its_logits_are_needed() -> None:
    caches, cache = store(), Cache(20)
    caches.put("k", text(0, 20), cache)
    assert caches.take("k", text(0, 20)) == (cache, 19)
    assert cache.length == 19


@pytest.mark.parametrize(("key", "prompt"), [("other", text(0, 30)), ("k", text(0, 15)), ("k", text(5, 30))])
def test_others_conversations_and_short_beginnings_are_left_alone(key: str, prompt: list[int]) -> None:
    caches = store()
    caches.put("k", text(0, 20), Cache(20))
    assert caches.take(key, prompt) == (None, 0)
    assert len(caches) == 1


def test_a_conversation_keeps_its_cache_if_another_shares_less_than_half_of_it() -> None:
    caches = store()
    caches.put("k", text(0, 100), Cache(100))
    assert caches.take("k", [*text(0, 40), 999]) == (None, 0)
    assert caches.take("k", [*text(0, 60), 999])[1] == 60


@pytest.mark.parametrize("bounds", [{"max_caches": 3}, {"max_bytes": 60}, {"max_bytes": 240, "token_bytes": 4}])
def test_the_oldest_go_where_there_are_too_many(bounds: dict[str, int]) -> None:
    caches = store(**bounds)
    for number in range(5):
        caches.put("k", text(1000 * number, 20), Cache(20))
    assert len(caches) == 3
    assert [caches.take("k", text(1000 * number, 21))[1] for number in range(5)] == [0, 0, 20, 20, 20]


@pytest.mark.parametrize(("length", "croppable"), [(1001, True), (15, True), (20, False)])
def test_too_large_too_small_and_unfit_ones_are_not_kept(length: int, croppable: bool) -> None:
    caches = store()
    caches.put("k", text(0, length), Cache(length, is_croppable=croppable))
    assert len(caches) == 0


def test_old_ones_go() -> None:
    clock = Clock()
    caches = store(clock)
    caches.put("k", text(0, 20), Cache(20))
    clock.now = 9.0
    caches.put("k", text(500, 20), Cache(20))
    clock.now = 11.0
    caches.drop_old()
    assert len(caches) == 1
    assert caches.take("k", text(0, 30)) == (None, 0)


def test_latents_are_counted_once_for_all_heads() -> None:
    plain, latent = tiny_model("llama"), tiny_model("deepseek_v3")
    config = plain.config
    keys = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    assert _token_bytes(plain) == 4 * config.num_hidden_layers * 2 * keys
    config = latent.config
    assert _token_bytes(latent) == 4 * config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
