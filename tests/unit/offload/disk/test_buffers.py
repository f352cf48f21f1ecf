"""A buffer begins where the disk can write straight to where its bytes belong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarm_plugins.offload.disk.buffers import fitted, host_buffer
from swarm_plugins.offload.disk.direct_file import BLOCK_BYTES
from swarm_plugins.offload.interfaces import BufferLayout, FileRange


def file_range(start: int, num_bytes: int, offset: int) -> FileRange:
    return FileRange(Path("weights"), start, num_bytes, offset, "w")


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


def test_codes_ask_for_the_alignment_of_vectors() -> None:
    shape = (4, 4)
    assert BufferLayout.of([("up", torch.float32, shape), ("bias", torch.bfloat16, (4,))]).alignment == 4
    assert BufferLayout.of([("up.codes", torch.uint8, shape), ("up.scales", torch.bfloat16, (4,))]).alignment == 64
