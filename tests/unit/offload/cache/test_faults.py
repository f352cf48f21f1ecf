"""Disks that fail, hang or are shared: one typed error, and the cache goes on."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
from cache_kit import FakeStore, borrowed, content, make, num_open, wait_for, wait_for_borrower

from swarm_plugins.errors import CheckpointError, SwarmError
from swarm_plugins.offload.cache.cache import BoundedCache


def test_a_disk_that_fails_in_mid_run_is_an_error_once_and_then_forgotten(
    store: FakeStore, cache: BoundedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    borrowed(cache, 0, [0])

    def fail(*arguments: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        for _ in range(5):
            with pytest.raises(CheckpointError, match=r"layer1\.bin: tensor 'experts\.2\.up' cannot be read"):
                borrowed(cache, 1, [2])
        # What is in memory needs no disk.
        assert borrowed(cache, 0, [0]) == {0: store.expected(0, 0)}
    assert borrowed(cache, 1, [0, 1, 2, 3]) == {expert: store.expected(1, expert) for expert in range(4)}


def test_what_arrived_before_an_error_was_right(store: FakeStore, cache: BoundedCache) -> None:
    whole = store.path(0).read_bytes()
    store.path(0).write_bytes(whole[: 13 + 3 * 2 * store.tensor_bytes(0)])
    arrived = {}

    def borrow() -> None:
        for expert, views in cache.borrow(0, [0, 1, 2, 3]):
            arrived[expert] = content(views)

    with pytest.raises(CheckpointError, match=r"layer0\.bin: the file ends .*'experts\.3\.up'"):
        borrow()
    assert arrived == {expert: store.expected(0, expert) for expert in arrived}


def test_a_hanging_disk_is_an_error_at_the_deadline(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(store, num_fast=4, read_timeout_s=1)
    go_on, real = threading.Event(), os.preadv

    def hang(*arguments: Any) -> int:
        go_on.wait(60)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", hang)
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match=r"layer0\.bin: tensor 'experts\.1\.up' .* was not read within 1 s"):
        borrowed(cache, 0, [1])
    assert time.monotonic() - begin < 50
    cache.config = replace(cache.config, read_timeout_s=30)
    go_on.set()
    assert borrowed(cache, 0, [1]) == {1: store.expected(0, 1)}
    cache.close()


def test_a_borrower_that_stops_half_way_leaves_nothing_held(store: FakeStore, cache: BoundedCache) -> None:
    for _ in range(10):
        lent = cache.borrow(0, [0, 1, 2, 3])
        next(lent)
        lent.close()
    # Reads that had begun end first.
    wait_for(lambda: not any(cache._policy.is_held(key) for key in store.contents))


def test_an_unreferenced_cache_is_gone_with_its_threads_and_files(store: FakeStore) -> None:
    cache = make(store, num_fast=4)
    borrowed(cache, 0, range(4))
    assert num_open(store.directory) == 1
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    # Readers without work have to end by themselves.
    wait_for(lambda: not any(thread.name == "expert-reader" for thread in threading.enumerate()))
    assert num_open(store.directory) == 0


def test_closing_while_others_wait_wakes_them(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(store, num_fast=4)
    go_on, real, errors = threading.Event(), os.preadv, []

    def hang(*arguments: Any) -> int:
        go_on.wait(60)
        return real(*arguments)

    def borrow() -> None:
        try:
            borrowed(cache, 0, [0])
        except SwarmError as error:
            errors.append(str(error))

    monkeypatch.setattr(os, "preadv", hang)
    borrower = threading.Thread(target=borrow)
    borrower.start()
    wait_for_borrower(cache)
    closer = threading.Thread(target=cache.close)
    closer.start()
    borrower.join(30)
    go_on.set()
    closer.join(30)
    assert not borrower.is_alive()
    assert len(errors) == 1
    assert "closed" in errors[0]
