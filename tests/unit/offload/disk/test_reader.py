"""Ranges arrive byte for byte, past the page cache or not, and a bad disk is named."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_kit import num_open
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_plugins.errors import CheckpointError
from swarm_plugins.offload.disk.buffers import MIN_MAPPED_BYTES, fitted, host_buffer
from swarm_plugins.offload.disk.direct_file import BLOCK_BYTES
from swarm_plugins.offload.disk.read_queue import Job, ReadQueue
from swarm_plugins.offload.disk.reader import CHUNK_BYTES, RangeReader, ReadCancelled
from swarm_plugins.offload.interfaces import FileRange

SIZE = 3 * CHUNK_BYTES + 777


@pytest.fixture(scope="module")
def content() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, content: np.ndarray) -> Path:
    path = tmp_path_factory.mktemp("reader") / "weights.safetensors"
    path.write_bytes(content.tobytes())
    return path


def job() -> Job:
    return Job(lambda job: None, is_guess=False)


def read(ranges: Sequence[FileRange], into: int | np.ndarray, queue: ReadQueue | None = None) -> np.ndarray:
    """Reads into an array, or into a new one of so many bytes."""
    reader = RangeReader(queue)
    place = np.zeros(into, np.uint8) if isinstance(into, int) else into
    try:
        reader.read(ranges, place, job())
    finally:
        reader.close()
    return place


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that does not know O_DIRECT."""
    real = os.open

    def refusing(path: Any, flags: int, *arguments: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *arguments)

    monkeypatch.setattr(os, "open", refusing)


@settings(max_examples=30, deadline=None)
@given(pieces=st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(0, 2 * CHUNK_BYTES)), min_size=1, max_size=5))
def test_any_ranges_arrive_where_they_belong(path: Path, content: np.ndarray, pieces: list[tuple[int, int]]) -> None:
    ranges, expected, end = [], [], 0
    for start, size in pieces:
        size = min(size, SIZE - start)
        ranges.append(FileRange(path, start, size, end, f"tensor at {start}"))
        expected.append(content[start : start + size])
        end += size
    assert np.array_equal(read(ranges, end), np.concatenate(expected))


def test_neighbors_are_read_in_one_go(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: calls.append(arguments) or real(*arguments))
    read([FileRange(path, 100 + 50 * place, 50, 50 * place, "a") for place in range(10)], 500)
    assert len(calls) == 1


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no O_DIRECT")
def test_a_file_system_without_direct_reads_is_read_all_the_same(
    path: Path, content: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch)
    assert np.array_equal(read([FileRange(path, 5, SIZE - 5, 0, "a")], SIZE - 5), content[5:])


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no O_DIRECT")
def test_direct_reads_refused_at_the_first_read_are_given_up(
    path: Path, content: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = os.preadv, [OSError(errno.EINVAL, "Invalid argument")]

    def refusing(*arguments: Any) -> int:
        if failures:
            raise failures.pop()
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", refusing)
    assert np.array_equal(read([FileRange(path, 5, 5000, 0, "a")], 5000), content[5:5005])
    assert not failures


def test_a_disk_that_gives_little_at_a_time_is_asked_again(
    path: Path, content: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    # Multiples of a block, as O_DIRECT would give.
    monkeypatch.setattr(os, "preadv", lambda fd, views, start: real(fd, [views[0][:8192]], start))
    assert np.array_equal(read([FileRange(path, 4000, 100_000, 0, "a")], 100_000), content[4000:104_000])


def test_a_truncated_file_is_named_with_the_tensor(path: Path) -> None:
    ranges = [FileRange(path, SIZE - 100, 50, 0, "whole"), FileRange(path, SIZE - 50, 60, 50, "cut")]
    with pytest.raises(CheckpointError, match=rf"weights\.safetensors: the file ends at byte {SIZE}, within .*'cut'"):
        read(ranges, 110)


def test_a_missing_file_is_named_with_the_tensor(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: tensor 'w1' cannot be read: No such file"):
        read([FileRange(tmp_path / "gone.safetensors", 0, 10, 0, "w1")], 10)


def test_a_cancelled_read_stops_at_the_next_chunk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, wanted = RangeReader(), job()
    real, calls = os.preadv, []

    def read_and_cancel(*arguments: Any) -> int:
        calls.append(arguments)
        wanted.is_cancelled = True
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", read_and_cancel)
    with pytest.raises(ReadCancelled):
        reader.read([FileRange(path, 0, SIZE, 0, "a")], np.zeros(SIZE, np.uint8), wanted)
    reader.close()
    assert len(calls) == 1


@pytest.fixture
def queue() -> Iterator[ReadQueue]:
    queue = ReadQueue(2)
    yield queue
    queue.close()


def test_an_idle_reader_takes_half(path: Path, content: np.ndarray, queue: ReadQueue, monkeypatch: Any) -> None:
    threads, real, both = set(), os.preadv, threading.Barrier(2)

    def meet(*arguments: Any) -> int:
        if threading.current_thread() not in threads:
            threads.add(threading.current_thread())
            both.wait(5)  # for ever, if one thread read everything
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", meet)
    ranges = [FileRange(path, 7, SIZE // 3, 0, "a"), FileRange(path, 9, SIZE // 2, SIZE // 3, "b")]
    expected = np.concatenate([content[7 : 7 + SIZE // 3], content[9 : 9 + SIZE // 2]])
    assert np.array_equal(read(ranges, len(expected), queue), expected)
    assert len(threads) == 2


def test_a_reader_without_help_reads_both_halves(path: Path, content: np.ndarray, queue: ReadQueue) -> None:
    block = threading.Event()
    for _ in range(2):
        queue.submit(Job(lambda job: block.wait(10), is_guess=False))
    assert np.array_equal(read([FileRange(path, 1, SIZE - 1, 0, "a")], SIZE - 1, queue), content[1:])
    block.set()


@pytest.mark.parametrize("bad", [0, 1])
def test_either_half_may_fail(path: Path, queue: ReadQueue, monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    real = os.preadv

    def fail(fd: int, views: Any, start: int) -> int:
        if (start >= SIZE // 2) == bool(bad):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, start)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=r"tensor 'a' cannot be read: Input/output error"):
        read([FileRange(path, 0, SIZE, 0, "a")], SIZE, queue)


def test_half_an_expert_never_passes_for_a_whole_one(
    path: Path, queue: ReadQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = threading.Event()

    def fail(fd: int, views: Any, start: int) -> int:
        if start < SIZE // 4:
            # The other half is read by another thread, which fails for an unforeseen reason.
            assert helper.wait(10)
            return real(fd, views, start)
        helper.set()
        raise MemoryError("none left")

    real = os.preadv
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(MemoryError):
        read([FileRange(path, 0, SIZE, 0, "a")], SIZE, queue)


def test_a_disk_that_gives_nothing_is_no_short_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda *arguments: 0)
    with pytest.raises(CheckpointError, match=r"the disk gave nothing at byte 5, within tensor 'a'"):
        read([FileRange(path, 5, 100, 0, "a")], 100)


def test_a_file_stays_open_until_the_disk_has_answered(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, real, errors = threading.Event(), threading.Event(), os.preadv, list[CheckpointError]()

    def hang(*arguments: Any) -> int:
        begun.set()
        go_on.wait(10)
        return real(*arguments)

    def read_all() -> None:
        try:
            reader.read([FileRange(path, 0, SIZE, 0, "a")], np.zeros(SIZE, np.uint8), job())
        except CheckpointError as error:
            errors.append(error)

    reader = RangeReader()
    monkeypatch.setattr(os, "preadv", hang)
    thread = threading.Thread(target=read_all)
    thread.start()
    assert begun.wait(10)
    reader.close()
    assert num_open(path.parent) == 1
    go_on.set()
    thread.join(10)
    assert "the model was unloaded" in str(errors)
    assert num_open(path.parent) == 0


@settings(max_examples=40, deadline=None)
@given(data=st.data(), is_shared=st.booleans())
def test_whatever_fits_in_place_every_byte_arrives_and_no_other(
    path: Path, content: np.ndarray, data: st.DataObject, is_shared: bool
) -> None:
    # Neighbors in the file, which are read in one go, in any order in the buffer and with gaps there.
    cuts = sorted(data.draw(st.lists(st.integers(0, SIZE // 512), min_size=2, max_size=5, unique=True)))
    unit = data.draw(st.sampled_from([512, 511]))
    pieces = [(unit * a, unit * (b - a)) for a, b in pairwise(cuts)]
    ranges, end = [], 0
    for start, size in data.draw(st.permutations(pieces)):
        end += data.draw(st.sampled_from([0, 64, 512, BLOCK_BYTES]))
        ranges.append(FileRange(path, start, size, end, f"tensor at {start}"))
        end += size
    buffer = host_buffer(max(end, MIN_MAPPED_BYTES))[:end]
    place = fitted(buffer, ranges, 1)
    place.fill_(7)
    expected = np.full(end, 7, np.uint8)
    for item in ranges:
        expected[item.offset : item.offset + item.num_bytes] = content[item.start : item.start + item.num_bytes]
    queue = ReadQueue(2) if is_shared else None
    read(ranges, place.numpy(), queue)
    if queue is not None:
        queue.close()
    assert np.array_equal(place.numpy(), expected)


def test_an_expert_that_fits_is_copied_at_its_ends_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[Any] = []
    real = os.preadv

    def note(fd: int, into: Sequence[Any], start: int) -> int:
        views.extend(into)
        return real(fd, into, start)

    monkeypatch.setattr(os, "preadv", note)
    third = 40 * BLOCK_BYTES
    # In the file: first, second, third; in the buffer the second comes last, as a down projection does.
    ranges = [
        FileRange(path, 1000, third, 0, "w1"),
        FileRange(path, 1000 + third, third, 2 * third, "w2"),
        FileRange(path, 1000 + 2 * third, third, third, "w3"),
    ]
    place = fitted(host_buffer(3 * third), ranges, 4)
    read(ranges, place.numpy())
    first, last = place.data_ptr(), place.data_ptr() + place.numel()
    in_place = [len(view) for view in views if first <= np.frombuffer(view, np.uint8).ctypes.data < last]
    assert in_place == [third - BLOCK_BYTES] * 3
    assert sum(len(view) for view in views) - sum(in_place) == 4 * BLOCK_BYTES
