"""Reading ahead: after what is needed, never at its cost, and counted for what it was worth."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cache_kit import FakeStore, borrowed, content, forget_counts, make, wait_for

from swarm_plugins.offload.cache.cache import BoundedCache
from swarm_plugins.offload.disk.read_queue import Job, ReadQueue


@pytest.fixture
def cache(store: FakeStore) -> Iterator[BoundedCache]:
    cache = make(store, num_fast=6)
    yield cache
    cache.close()


@pytest.fixture
def queue() -> Iterator[ReadQueue]:
    queue = ReadQueue(2)
    yield queue
    queue.close()


def is_ready(cache: BoundedCache, layer: int, expert: int) -> bool:
    slot = cache._slots.of(layer).get(expert)
    return slot is not None and slot.is_ready


class Gate:
    """A disk that reads when it is allowed to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.num_waiting = 0
        real = os.preadv

        def read(*arguments: Any) -> int:
            self.num_waiting += 1
            self.opened.wait(10)
            return real(*arguments)

        monkeypatch.setattr(os, "preadv", read)


def test_a_right_guess_makes_a_hit(cache: BoundedCache) -> None:
    cache.guess(1, [2, 3])
    borrowed(cache, 0, [0])
    wait_for(lambda: is_ready(cache, 1, 2) and is_ready(cache, 1, 3))
    forget_counts(cache)
    borrowed(cache, 1, [2, 3])
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.bytes_read) == (2, 0, 0)
    assert (stats.guesses, stats.guesses_used, stats.guesses_late) == (2, 2, 0)
    assert (stats.recall, stats.waste) == (1.0, 0.0)


def test_nothing_is_read_before_a_layer_has_asked(store: FakeStore, cache: BoundedCache) -> None:
    cache.guess(1, [0, 1])
    time.sleep(0.05)
    assert not cache._slots.of(1)


def test_a_wrong_guess_is_counted_and_stays_evictable(store: FakeStore, cache: BoundedCache) -> None:
    cache.guess(1, [2, 3])
    borrowed(cache, 0, [0])
    wait_for(lambda: is_ready(cache, 1, 2) and is_ready(cache, 1, 3))
    borrowed(cache, 1, [0, 2])
    stats = cache.stats()
    assert (stats.guesses, stats.guesses_used) == (2, 1)
    assert (stats.recall, stats.waste) == (0.5, 0.5)
    assert not any(cache._policy.is_held(key) for key in store.contents)


def test_a_late_guess_is_joined_not_read_twice(
    store: FakeStore, cache: BoundedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    borrowed(cache, 0, [0])
    forget_counts(cache)
    gate = Gate(monkeypatch)
    cache.guess(1, [2])
    borrowed(cache, 0, [0])
    wait_for(lambda: gate.num_waiting == 1)
    threading.Timer(0.05, gate.opened.set).start()
    assert borrowed(cache, 1, [2]) == {2: store.expected(1, 2)}
    stats = cache.stats()
    assert (stats.misses, stats.guesses_late, stats.bytes_read) == (1, 1, 2 * store.tensor_bytes(1))
    wait_for(lambda: not any(isinstance(thread, threading.Timer) for thread in threading.enumerate()))


def test_a_wrong_guess_that_waits_is_never_read(
    store: FakeStore, cache: BoundedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    borrowed(cache, 0, [0])
    borrowed(cache, 1, [0])
    forget_counts(cache)
    gate = Gate(monkeypatch)
    cache.guess(1, [1, 2, 3])  # two readers: the third waits
    borrowed(cache, 0, [0])
    wait_for(lambda: gate.num_waiting == 2)
    borrowed(cache, 1, [0])
    gate.opened.set()
    wait_for(lambda: not any(cache._policy.is_held(key) for key in store.contents))
    assert gate.num_waiting == 2
    assert not is_ready(cache, 1, 3)


def test_a_layer_behind_is_read_after_the_next_one(
    store: FakeStore, cache: BoundedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []
    load = cache._loader.load
    monkeypatch.setattr(
        cache._loader, "load", lambda key, into, job: begun.append((key.layer, key.expert)) or load(key, into, job)
    )
    cache.guess(1, [2, 3])
    cache.guess(2, [1])
    borrowed(cache, 0, [0])
    wait_for(lambda: is_ready(cache, 1, 2) and is_ready(cache, 1, 3) and is_ready(cache, 2, 1))
    assert begun[0] == (0, 0)
    assert begun[-1] == (2, 1)
    borrowed(cache, 1, [2, 3])
    borrowed(cache, 2, [1])
    stats = cache.stats()
    assert (stats.guesses, stats.guesses_used, stats.guessed_loads, stats.hits) == (3, 3, 3, 3)
    assert not any(cache._policy.is_held(key) for key in store.contents)


def test_a_better_guess_takes_the_place_of_the_one_before(store: FakeStore, cache: BoundedCache) -> None:
    cache.guess(1, [0])
    cache.guess(2, [0, 1])
    borrowed(cache, 0, [0])
    wait_for(lambda: is_ready(cache, 2, 0) and is_ready(cache, 2, 1))
    cache.guess(2, [1, 2])
    borrowed(cache, 1, [0])
    wait_for(lambda: is_ready(cache, 2, 2))
    held = {(key.layer, key.expert) for key in store.contents if cache._policy.is_held(key)}
    assert held == {(2, 1), (2, 2)}
    borrowed(cache, 2, [1, 2])
    stats = cache.stats()
    assert (stats.guesses, stats.guesses_used) == (3, 3)
    assert (stats.guessed_loads, stats.guessed_loads_used) == (4, 3)


def test_a_layer_that_a_guess_makes_complete_keeps_the_guess(store: FakeStore, cache: BoundedCache) -> None:
    borrowed(cache, 2, [0, 1, 2])
    forget_counts(cache)
    cache.guess(1, [])
    cache.guess(2, [3])
    borrowed(cache, 0, [0])
    assert cache.is_complete(2)
    cache.guess(2, [])
    borrowed(cache, 1, [0])
    wait_for(lambda: is_ready(cache, 2, 3))
    assert [key for key in store.contents if cache._policy.is_held(key)] == [(2, 3)]
    borrowed(cache, 2, [3])
    stats = cache.stats()
    assert (stats.guesses, stats.guesses_used, stats.guessed_loads_used, stats.asked_after_guess) == (1, 1, 1, 1)


def test_a_guess_that_was_given_up_and_is_made_again_is_read(
    store: FakeStore, cache: BoundedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    borrowed(cache, 0, [0])
    gate = Gate(monkeypatch)
    cache.guess(1, [2])
    borrowed(cache, 0, [0])
    wait_for(lambda: gate.num_waiting == 1)
    borrowed(cache, 0, [0])  # another layer was guessed: the read is told to stop
    cache.guess(1, [2])
    borrowed(cache, 0, [0])
    gate.opened.set()
    wait_for(lambda: is_ready(cache, 1, 2))


def test_a_layer_that_was_not_guessed_ends_all_guesses(store: FakeStore, cache: BoundedCache) -> None:
    cache.guess(1, [2])
    cache.guess(2, [3])
    borrowed(cache, 0, [0])
    wait_for(lambda: is_ready(cache, 1, 2) and is_ready(cache, 2, 3))
    borrowed(cache, 0, [0])
    assert not any(cache._policy.is_held(key) for key in store.contents)
    assert cache.stats().guesses == 2


def test_what_was_cancelled_can_be_asked_for_at_once(
    store: FakeStore, cache: BoundedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    borrowed(cache, 0, [0])
    borrowed(cache, 1, [0])
    gate = Gate(monkeypatch)
    cache.guess(1, [2])
    borrowed(cache, 0, [0])
    wait_for(lambda: gate.num_waiting == 1)
    borrowed(cache, 1, [0])  # cancels
    timer = threading.Timer(0.05, gate.opened.set)
    timer.start()
    assert borrowed(cache, 1, [2]) == {2: store.expected(1, 2)}
    timer.join()


def test_guesses_evict_nothing_in_use_and_give_way_to_needs(store: FakeStore) -> None:
    cache = make(store, num_fast=3)
    lent = cache.borrow(0, [0, 1])
    expert, views = next(lent)
    cache.guess(1, [0, 1, 2, 3])
    borrowed(cache, 2, [0])
    assert content(views) == store.expected(0, expert)
    # The guess holds what is left: a need takes it away.
    assert borrowed(cache, 2, [1, 2]) == {1: store.expected(2, 1), 2: store.expected(2, 2)}
    lent.close()
    cache.close()


def test_a_failed_guess_is_no_error_until_it_is_needed(store: FakeStore, cache: BoundedCache) -> None:
    whole = store.path(1).read_bytes()
    store.path(1).write_bytes(whole[:20])
    cache.guess(1, [2])
    borrowed(cache, 0, [0])
    wait_for(lambda: not cache._slots.of(1))
    store.path(1).write_bytes(whole)
    assert borrowed(cache, 1, [2]) == {2: store.expected(1, 2)}


def test_needed_jobs_overtake_guesses_and_keep_them_waiting(queue: ReadQueue) -> None:
    order, block, begun = [], threading.Event(), threading.Event()

    def hold(job: Job) -> None:
        begun.set()
        block.wait(10)

    queue.submit(Job(hold, is_guess=False))
    begun.wait(10)
    queue.submit(Job(lambda job: order.append("guess"), is_guess=True))
    queue.submit(Job(lambda job: order.append("need"), is_guess=False))
    wait_for(lambda: order == ["need"])
    time.sleep(0.02)
    assert order == ["need"]  # one reader is idle, but something needed is still being read
    block.set()
    wait_for(lambda: order == ["need", "guess"])


def test_a_guess_that_is_needed_counts_as_needed(queue: ReadQueue) -> None:
    done, block = [], threading.Event()
    guess = Job(lambda job: block.wait(10), is_guess=True)
    queue.submit(guess)
    wait_for(lambda: not queue._guesses)
    queue.need(guess)
    queue.submit(Job(lambda job: done.append(1), is_guess=True))
    time.sleep(0.02)
    assert not done
    block.set()
    wait_for(lambda: done == [1])


def test_a_job_that_has_not_begun_can_be_taken_back(queue: ReadQueue) -> None:
    block, done = threading.Event(), []
    for _ in range(2):
        queue.submit(Job(lambda job: block.wait(10), is_guess=False))
    job = Job(lambda job: done.append(1), is_guess=False)
    queue.submit(job)
    assert queue.cancel(job)
    block.set()
    queue.close()
    assert not done


def test_every_job_is_run_once_whatever_the_timing(queue: ReadQueue) -> None:
    done: list[int] = []
    for number in range(300):
        queue.submit(Job(lambda job, number=number: done.append(number), is_guess=number % 3 == 0))  # type: ignore[misc]
        if number % 50 == 0:
            time.sleep(0.01)
    wait_for(lambda: len(done) == 300)
    assert sorted(done) == list(range(300))
