"""Memory for experts: buffers within a byte budget, begun where the disk can write straight into them.

A read past the page cache moves whole blocks: the disk's offset and the address in memory have to be multiples of one.
A tensor that lies in its buffer as it lies in its file, counted from a multiple of a block, needs no copy but at its
ends, so a buffer may begin a little later in its memory. Where half of the experts are in memory, that saved a sixth to
a half of a token's time (docs/benchmarks.md): a copy costs a reader a third of what the disk does, and processor and
memory are busy with the model.
"""

from __future__ import annotations

import mmap
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from swarm_plugins.errors import CapacityError
from swarm_plugins.offload.disk.direct_file import BLOCK_BYTES
from swarm_plugins.offload.interfaces import FileRange

_WIPE_ON_FORK = 18
MIN_MAPPED_BYTES = 1 << 16
"""Smaller buffers do not get a mapping of their own, which would cost at least a page."""


def host_buffer(num_bytes: int) -> Tensor:
    """Returns ``[num_bytes]`` of uint8, aligned to 64 bytes, in memory that returns to the system when dropped.

    A large buffer begins on a page and has a spare page behind it, so that `fitted` can move it.

    Raises:
        OSError: If there is no memory.
    """
    if num_bytes < MIN_MAPPED_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    memory = _private(num_bytes + BLOCK_BYTES) or mmap.mmap(-1, num_bytes + BLOCK_BYTES)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def _private(num_bytes: int) -> mmap.mmap | None:
    """Returns memory with huge pages, which Linux does not give to shared memory, Python's default.

    A disk writes to them in larger requests: 2.6 GB/s instead of 1.2 to 1.7 on a virtual disk, at a sixth of the
    processor's time. None where a fork would share the memory: the disk could then write to the other process's pages
    (open(2), O_DIRECT), and each overwritten expert would be kept for that process.
    """
    if sys.platform != "linux":
        return None
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(_WIPE_ON_FORK)
    except OSError:
        return None
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def fitted(buffer: Tensor, ranges: Sequence[FileRange], alignment: int) -> Tensor:
    """Returns as many bytes of a buffer's memory, begun where most bytes of some ranges can be read without a copy.

    The buffer, ``[num_bytes]`` of uint8 on the CPU, is from `host_buffer`, which leaves room for the shift, and is
    returned itself if no shift fits. The result begins at a multiple of ``alignment``.
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


def device_buffer(device: torch.device) -> Callable[[int], Tensor]:
    """Returns an allocator of ``[num_bytes]`` of uint8 on a device."""
    return lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=device)


class BufferPool:
    """Buffers of several sizes, free ones included, within a budget; made when first needed, then reused.

    Not thread-safe. The name of the budget is for messages.
    """

    def __init__(self, limit_bytes: int, allocate: Callable[[int], Tensor], name: str) -> None:
        self.limit_bytes = limit_bytes
        self.allocated_bytes = 0
        self._allocate = allocate
        self._name = name
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, num_bytes: int) -> Tensor:
        """Returns a buffer of arbitrary content.

        Raises:
            CapacityError: If it would exceed the budget, or the system has no memory left.
        """
        if self._free[num_bytes]:
            return self._free[num_bytes].pop()
        self._shrink(self.limit_bytes - num_bytes)
        if self.allocated_bytes + num_bytes > self.limit_bytes:
            raise CapacityError(
                f"a buffer of {num_bytes} bytes does not fit: {self.allocated_bytes} of {self.limit_bytes} bytes "
                f"({self._name}) are in use"
            )
        try:
            buffer = self._allocate(num_bytes)
        except (OSError, RuntimeError) as error:
            raise CapacityError(
                f"no memory for another expert of {num_bytes} bytes, with {self.allocated_bytes} of {self.limit_bytes} "
                f"bytes ({self._name}) taken: {error}; lower {self._name}"
            ) from error
        self.allocated_bytes += num_bytes
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back for reuse."""
        self._free[buffer.numel()].append(buffer)

    def recount(self, taken_bytes: int) -> None:
        """Corrects the count after an interrupted change; ``taken_bytes`` are in use, other taken buffers are gone."""
        self.allocated_bytes = taken_bytes + sum(size * len(buffers) for size, buffers in self._free.items())

    def clear(self) -> None:
        self._shrink(0)

    def _shrink(self, goal_bytes: int) -> None:
        # Sizes differ between layers: free buffers of another size make room.
        for num_bytes, buffers in self._free.items():
            while buffers and self.allocated_bytes > goal_bytes:
                buffers.pop()
                self.allocated_bytes -= num_bytes
