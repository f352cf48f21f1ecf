"""Which bytes of a file the disk can write straight to where they belong, and which have to be copied there.

A read past the page cache moves whole blocks: the disk's offset and the address in memory have to be multiples of one.
Where a tensor lies in its buffer as it lies in its file, counted from a multiple of a block, all of it but its ends
needs no copy. A buffer is made to fit by beginning a little later in its memory. That took a sixth to a half of the
time of a token away where half of the experts are in memory (docs/benchmarks.md): a copy costs a reader a third of
what the disk does, and the processor and its memory are busy with the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from swarm_plugins.offload.disk.direct_file import BLOCK_BYTES, Bytes
from swarm_plugins.offload.interfaces import FileRange

__all__ = ["Part", "fitted", "parts_of", "scatter"]


class Part(NamedTuple):
    """Blocks of a file that are read to one place."""

    start: int
    """First byte in the file."""
    num_bytes: int
    target: Bytes | None
    """Where they belong; None: parts of them belong somewhere, or nowhere."""


def fitted(buffer: Tensor, ranges: Sequence[FileRange], alignment: int) -> Tensor:
    """Returns as many bytes of a buffer's memory, begun where most of some ranges can be read without a copy.

    Args:
        buffer: ``[num_bytes]`` of uint8 on the CPU, from `host_buffer`, which leaves room for that.
        ranges: What is to be read into it.
        alignment: Bytes to whose multiples the result has to be aligned.

    Returns:
        ``[num_bytes]``; the buffer itself if it cannot be made to fit.
    """
    address = buffer.data_ptr()
    room = buffer.untyped_storage().nbytes() - buffer.storage_offset() - buffer.numel()
    shifts = Counter({0: 0})
    for item in ranges:
        shift = (item.start - item.offset - address) % BLOCK_BYTES
        if shift <= room and (address + shift) % alignment == 0:
            shifts[shift] += item.num_bytes
    shift = max(shifts, key=shifts.__getitem__)
    return buffer.as_strided(buffer.shape, (1,), buffer.storage_offset() + shift)


def parts_of(first: int, last: int, run: Sequence[FileRange], into: Bytes) -> Iterator[Part]:
    """Cuts a piece of a file into what is read in place and what is not.

    Args:
        first: First byte in the file, a multiple of a block.
        last: The byte behind it, likewise.
        run: Ranges in the order of the file.
        into: What their offsets count from.
    """
    address = into.ctypes.data
    position = first
    for item in run:
        if (address + item.offset - item.start) % BLOCK_BYTES:
            continue
        begin = -(-max(item.start, position) // BLOCK_BYTES) * BLOCK_BYTES
        end = min(item.start + item.num_bytes, last) // BLOCK_BYTES * BLOCK_BYTES
        if begin < end:
            if position < begin:
                yield Part(position, begin - position, None)
            target = item.offset + begin - item.start
            yield Part(begin, end - begin, into[target : target + end - begin])
            position = end
    if position < last:
        yield Part(position, last - position, None)


def scatter(chunk: Bytes, position: int, run: Sequence[FileRange], into: Bytes) -> None:
    """Copies bytes of a file to where they belong.

    Args:
        chunk: The bytes.
        position: Of the first of them in the file.
        run: Ranges of the file.
        into: What their offsets count from.
    """
    for item in run:
        first, last = max(item.start, position), min(item.start + item.num_bytes, position + len(chunk))
        if first < last:
            target = item.offset + first - item.start
            # numpy releases the interpreter while it copies; torch would start threads, a memoryview hold the lock.
            np.copyto(into[target : target + last - first], chunk[first - position : last - position])
