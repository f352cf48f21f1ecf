"""Ctrl-C, full memory and missing threads: whatever a borrow is interrupted by, the next one finds the books right."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from cache_kit import FakeStore, borrowed, wait_for

from swarm_plugins.errors import CapacityError
from swarm_plugins.offload.cache.cache import BoundedCache

_BOOKS = frozenset(("slots.py", "policy.py", "buffers.py", "guesses.py"))
# Before each call only: lines have an end of a with block among them, where Python never looks for signals.
_LOCKING = frozenset(("cache.py", "read_queue.py"))


class Interrupt:
    """Ctrl-C at the n-th place from now."""

    def __init__(self, num_places: int) -> None:
        self.left = num_places

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = Path(frame.f_code.co_filename).name
        if "offload" not in frame.f_code.co_filename or name not in _LOCKING | _BOOKS:
            return None
        if event == "call" or (event == "line" and name in _BOOKS):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._trace


def check_books(cache: BoundedCache) -> None:
    """Nothing is held, and policy, slots and buffers know of the same experts, once all reads have ended."""
    wait_for(lambda: all(slot.job is None for layer in cache.num_experts for slot in cache._slots.of(layer).values()))
    policy, pool = cache._policy, cache._slots._pool
    guessed = [slot.key for slot in cache._guesses.held()]
    slots = [slot for layer in cache.num_experts for slot in cache._slots.of(layer).values()]
    assert {layer: policy.residents[layer] for layer in cache.num_experts} == {
        layer: set(cache._slots.of(layer)) for layer in cache.num_experts
    }
    assert sum(map(sum, policy._holds.values())) == len(guessed)
    free_bytes = sum(buffer.numel() for buffers in pool._free.values() for buffer in buffers)
    used_bytes = sum(slot.buffer.numel() for slot in slots)
    assert policy.used_bytes == used_bytes
    assert pool.allocated_bytes == used_bytes + free_bytes <= pool.limit_bytes
    assert all(slot.is_ready for slot in slots)


def interrupted(cache: BoundedCache, num_places: int) -> bool:
    """Borrows with a guess and evictions, with Ctrl-C at a place; says whether that place was reached."""
    with Interrupt(num_places) as interrupt:
        try:
            borrowed(cache, 0, [1, 2])
            cache.guess(2, [0, 1])
            borrowed(cache, 1, [0, 1, 3])
            borrowed(cache, 2, [1, 2])
        except KeyboardInterrupt:
            pass
    return interrupt.left <= 0


def test_ctrl_c_at_any_place_leaves_a_cache_that_works(store: FakeStore, cache: BoundedCache) -> None:
    num_places = 1
    while interrupted(cache, num_places):
        for layer in range(3):
            assert borrowed(cache, layer, range(4)) == {expert: store.expected(layer, expert) for expert in range(4)}
        check_books(cache)
        # Not every place, to be quick: threads make each run a little different anyway.
        num_places += 13
    assert num_places > 300


def test_no_memory_leaves_nothing_held(store: FakeStore, cache: BoundedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    borrowed(cache, 0, [0, 1])

    def fail(num_bytes: int) -> None:
        raise OSError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(cache._slots._pool, "_allocate", fail)
        with pytest.raises(CapacityError, match="no memory for another expert"):
            borrowed(cache, 0, [0, 1, 2])
    check_books(cache)
    assert borrowed(cache, 0, range(4)) == {expert: store.expected(0, expert) for expert in range(4)}


def test_no_thread_to_read_with_is_an_error_and_then_forgotten(
    store: FakeStore, cache: BoundedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for expert in range(4):
            with pytest.raises(CapacityError, match=r"no thread .* \(can't start new thread\)"):
                borrowed(cache, 0, [expert])
        check_books(cache)
        cache._queue.close()
        cache._queue._is_closed = False
    assert borrowed(cache, 0, range(4)) == {expert: store.expected(0, expert) for expert in range(4)}


def test_one_thread_reads_everything_if_no_other_can_be_started(
    store: FakeStore, cache: BoundedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, started = threading.Thread.start, list[threading.Thread]()

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    assert borrowed(cache, 0, range(4)) == {expert: store.expected(0, expert) for expert in range(4)}
    assert len(started) == 1
