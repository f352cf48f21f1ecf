"""Bytes of a file go straight to where they belong wherever disk and memory agree on the alignment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_plugins.offload.disk.buffers import MIN_MAPPED_BYTES, host_buffer
from swarm_plugins.offload.disk.direct_file import BLOCK_BYTES, CHUNK_BYTES
from swarm_plugins.offload.disk.in_place import fitted, parts_of
from swarm_plugins.offload.disk.read_queue import Job, ReadQueue
from swarm_plugins.offload.disk.reader import RangeReader
from swarm_plugins.offload.interfaces import BufferLayout, FileRange

SIZE = 2 * CHUNK_BYTES + 777


@pytest.fixture(scope="module")
def content() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, content: np.ndarray) -> Path:
    path = tmp_path_factory.mktemp("in_place") / "weights.safetensors"
    path.write_bytes(content.tobytes())
    return path


def read(ranges: Sequence[FileRange], into: torch.Tensor, queue: ReadQueue | None = None) -> None:
    reader = RangeReader(queue)
    try:
        reader.read(ranges, into.numpy(), Job(lambda job: None, is_guess=False))
    finally:
        reader.close()


def file_range(start: int, num_bytes: int, offset: int) -> FileRange:
    return FileRange(Path("weights"), start, num_bytes, offset, "w")


@settings(max_examples=40, deadline=None)
@given(data=st.data(), is_shared=st.booleans())
def test_whatever_fits_in_place_every_byte_arrives_and_no_other(
    path: Path, content: np.ndarray, data: st.DataObject, is_shared: bool
) -> None:
    # Neighbours in the file, which are read in one go, in any order in the buffer and with gaps there.
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
    read(ranges, place, queue)
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
    read(ranges, place)
    first, last = place.data_ptr(), place.data_ptr() + place.numel()
    in_place = [len(view) for view in views if first <= np.frombuffer(view, np.uint8).ctypes.data < last]
    assert in_place == [third - BLOCK_BYTES] * 3
    assert sum(len(view) for view in views) - sum(in_place) == 4 * BLOCK_BYTES


def test_a_buffer_begins_where_most_bytes_fit() -> None:
    buffer = host_buffer(1 << 20)
    small, large = file_range(100, 1000, 0), file_range(64 + BLOCK_BYTES, 1 << 19, 4096)
    place = fitted(buffer, [small, large], 64)
    assert place.data_ptr() == buffer.data_ptr() + 64
    assert place.shape == buffer.shape


@pytest.mark.parametrize(
    ("start", "alignment", "has_room"),
    [(6, 4, True), (32, 64, True), (4095, 1, False)],
    ids=["odd for the type", "odd for vectors", "no room"],
)
def test_a_buffer_that_cannot_be_made_to_fit_stays(start: int, alignment: int, has_room: bool) -> None:
    buffer = host_buffer(1 << 20) if has_room else torch.empty(1 << 20, dtype=torch.uint8)
    wanted = file_range(buffer.data_ptr() + start, 1 << 20, 0)
    assert fitted(buffer, [wanted], alignment).data_ptr() == buffer.data_ptr()


def test_a_place_does_not_depend_on_the_buffer() -> None:
    # The bits of a product can depend on how a weight is aligned: an expert lies the same way each time it comes.
    ranges = [file_range(2608, 1 << 20, 0)]
    assert {fitted(host_buffer(1 << 20), ranges, 4).data_ptr() % BLOCK_BYTES for _ in range(5)} == {2608}


def test_parts_follow_each_other() -> None:
    into = fitted(host_buffer(1 << 20), [file_range(5000, 1 << 20, 0)], 1).numpy()
    parts = list(parts_of(4096, 4096 + 16 * BLOCK_BYTES, [file_range(5000, 30_000, 0)], into))
    assert [(part.start // BLOCK_BYTES, part.num_bytes // BLOCK_BYTES, part.target is None) for part in parts] == [
        (1, 1, True),
        (2, 6, False),
        (8, 9, True),
    ]


def test_codes_ask_for_the_alignment_of_vectors() -> None:
    shape = (4, 4)
    assert BufferLayout.of([("up", torch.float32, shape), ("bias", torch.bfloat16, (4,))]).alignment == 4
    assert BufferLayout.of([("up.codes", torch.uint8, shape), ("up.scales", torch.bfloat16, (4,))]).alignment == 64
