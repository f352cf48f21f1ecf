"""A thread that waits for room gets it as soon as there is some."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from cache_kit import FakeStore, borrowed, make, wait_for_borrower

from swarm_plugins.offload.cache import cache as cache_module
from swarm_plugins.offload.cache.cache import BoundedCache


@pytest.fixture
def cache(store: FakeStore) -> Iterator[BoundedCache]:
    cache = make(store, num_fast=3, read_timeout_s=30)
    yield cache
    cache.close()


class Waiter:
    """Borrows an expert on a thread of its own."""

    def __init__(self, cache: BoundedCache, layer: int, expert: int) -> None:
        self.result: object = None
        self._thread = threading.Thread(target=self._run, args=(cache, layer, expert))
        self._thread.start()

    def _run(self, cache: BoundedCache, layer: int, expert: int) -> None:
        try:
            self.result = borrowed(cache, layer, [expert])
        except Exception as error:  # noqa: BLE001 - the test compares it with what was expected
            self.result = error

    def join(self) -> float:
        """Seconds until it had what it asked for."""
        begin = time.monotonic()
        self._thread.join(40)
        return time.monotonic() - begin


def test_a_borrower_gets_the_room_that_another_gives_back(store: FakeStore, cache: BoundedCache) -> None:
    borrowed(cache, 0, [0, 1, 2])
    loans = [cache.borrow(0, [expert]) for expert in range(3)]
    for loan in loans:
        next(loan)
    waiter = Waiter(cache, 1, 2)
    wait_for_borrower(cache)
    loans[1].close()
    assert waiter.join() < 10
    assert waiter.result == {2: store.expected(1, 2)}


def test_a_guess_gives_way_at_once_to_who_waits_for_room(store: FakeStore, cache: BoundedCache) -> None:
    loan = cache.borrow(0, [0, 1, 2])
    assert len(list(islice(loan, 3))) == 3
    waiter = Waiter(cache, 1, 2)
    wait_for_borrower(cache)
    with cache._lock:
        # Nothing is read for this guess, so nothing but the guess itself can make room.
        cache._guesses.plan(0, [0, 1, 2])
        cache._guesses.start()
        loan.close()
    assert waiter.join() < 10
    assert waiter.result == {2: store.expected(1, 2)}


def test_time_without_room_is_not_counted_as_the_disks(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(store, num_fast=3, read_timeout_s=3)
    loan = cache.borrow(0, [0, 1, 2])
    assert len(list(islice(loan, 3))) == 3
    real, now = os.preadv, 0.0

    def slow(*arguments: Any) -> int:
        nonlocal now
        now += 1.7
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    monkeypatch.setattr(cache_module, "time", SimpleNamespace(perf_counter=lambda: now))
    waiter = Waiter(cache, 1, 2)
    wait_for_borrower(cache)
    now += 1.7
    loan.close()
    waiter.join()
    assert waiter.result == {2: store.expected(1, 2)}
    cache.close()
