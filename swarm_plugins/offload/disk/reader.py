"""Reads the byte ranges of an expert into a buffer, with errors that name file and tensor."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from swarm_plugins.errors import CheckpointError
from swarm_plugins.offload.disk.direct_file import BLOCK_BYTES, DirectFile
from swarm_plugins.offload.disk.read_queue import Job, ReadQueue
from swarm_plugins.offload.interfaces import FileRange

Bytes = npt.NDArray[np.uint8]

CHUNK_BYTES = 4 << 20
"""Bytes asked for at once: enough for the disk's full speed, and few enough that a cancelled read stops soon."""
# Of half an expert: with less, another thread costs more than it saves.
_LEAST_SHARED_BYTES = 2 << 20
# Bytes between two ranges that are cheaper to read than to start another read for.
_MAX_GAP_BYTES = 64 * 1024


class ReadCancelled(Exception):
    """The bytes are no longer wanted."""


class RangeReader:
    """Fills buffers from files. Thread-safe; files are opened when first needed and stay open.

    An idle thread of the queue takes half of an expert that is needed now, so that the disk has two requests at a time.
    """

    def __init__(self, queue: ReadQueue | None = None) -> None:
        self._queue = queue
        self._files: dict[Path, DirectFile] = {}
        self._lock = threading.Lock()
        self._own = threading.local()
        self._num_reading = 0
        self._is_closed = False

    def read(self, ranges: Sequence[FileRange], into: Bytes, job: Job) -> int:
        """Reads one expert into ``[num_bytes]`` of uint8 and returns the bytes taken from disk.

        The job may be cancelled between chunks.

        Raises:
            CheckpointError: If a file is missing, ends early, was replaced or written to since its identity was
                taken, the disk fails, or the reader was closed: names file and tensor.
            ReadCancelled: If the read was cancelled.
        """
        with self._lock:
            self._num_reading += 1
        try:
            return self._read(ranges, into, job)
        finally:
            with self._lock:
                self._num_reading -= 1
                self._close_unused()

    def close(self) -> None:
        """Closes all files as soon as no read is running; a read that goes on or comes later is refused."""
        with self._lock:
            self._is_closed = True
            self._close_unused()

    def _close_unused(self) -> None:
        # A descriptor closed under a read may by then belong to another file, whose bytes would be taken for weights.
        if self._is_closed and not self._num_reading:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _read(self, ranges: Sequence[FileRange], into: Bytes, job: Job) -> int:
        half = sum(item.num_bytes for item in ranges) // 2
        if self._queue is None or job.is_guess or half < _LEAST_SHARED_BYTES:
            return self._read_runs(ranges, into, job)
        first, second = _split(ranges, half)
        other, result = _half(lambda: self._read_runs(second, into, job))
        self._queue.submit(other)
        try:
            num_bytes = self._read_runs(first, into, job)
        except BaseException:
            # The other half also writes to the buffer: it has to end first.
            if not self._queue.cancel(other):
                result.result()
            raise
        if self._queue.cancel(other):
            return num_bytes + self._read_runs(second, into, job)
        # The disk's own time is the only bound, as for any read.
        return num_bytes + result.result()

    def _read_runs(self, ranges: Sequence[FileRange], into: Bytes, job: Job) -> int:
        return sum(self._read_run(run, into, job) for run in _runs(ranges))

    def _read_run(self, run: Sequence[FileRange], into: Bytes, job: Job) -> int:
        path, position, end = run[0].path, run[0].start, _end(run[-1])
        while position < end:
            if job.is_cancelled:
                raise ReadCancelled
            tensor = next((item.tensor for item in run if position < _end(item)), run[-1].tensor)
            try:
                file = self._file(path)
                num_bytes = self._read_chunk(file, position, end, run, into)
                # After the bytes, so that these are covered.
                is_changed = run[0].identity not in (None, file.identity())
            except OSError as error:
                raise CheckpointError(
                    f"{path}: tensor {tensor!r} cannot be read: {error.strerror or error}; "
                    "is the disk there, and the checkpoint where it was?"
                ) from error
            if is_changed:
                raise CheckpointError(
                    f"{path}: the file was replaced or written to since the model was loaded, the bytes of tensor "
                    f"{tensor!r} may be others now: load the model again"
                )
            if num_bytes <= 0 and position < file.identity().num_bytes:
                raise CheckpointError(
                    f"{path}: the disk gave nothing at byte {position}, within tensor {tensor!r}; does it fail?"
                )
            if num_bytes <= 0:
                raise CheckpointError(
                    f"{path}: the file ends at byte {position}, within tensor {tensor!r} (bytes {run[0].start} to "
                    f"{end} are needed); the file is truncated: download it again"
                )
            position += num_bytes
        return end - run[0].start

    def _read_chunk(self, file: DirectFile, position: int, end: int, run: Sequence[FileRange], into: Bytes) -> int:
        """Reads the next bytes of a run, and returns how many there were."""
        first = position // BLOCK_BYTES * BLOCK_BYTES
        stop = min(first + CHUNK_BYTES, end)
        bounce, num_bounced = self._bounce(), 0
        places: list[memoryview] = []
        copied: list[tuple[int, Bytes]] = []
        for start, num_bytes, place in targets_of(first, -(-stop // BLOCK_BYTES) * BLOCK_BYTES, run, into):
            if place is None:
                place = np.frombuffer(bounce, np.uint8, num_bytes, num_bounced)
                num_bounced += num_bytes
                copied.append((start, place))
            places.append(place.data)
        reached = first + file.read(first, places)
        for start, chunk in copied:
            _scatter(chunk[: max(0, reached - start)], start, run, into)
        return min(reached, stop) - position

    def _bounce(self) -> mmap.mmap:
        """Returns this thread's aligned buffer, for bytes that cannot be read in place."""
        bounce: mmap.mmap | None = getattr(self._own, "bounce", None)
        if bounce is None:
            bounce = self._own.bounce = mmap.mmap(-1, CHUNK_BYTES)
        return bounce

    def _file(self, path: Path) -> DirectFile:
        with self._lock:
            if self._is_closed:
                raise OSError("the model was unloaded")
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = DirectFile(path)
            return file


def _half(read: Callable[[], int]) -> tuple[Job, Future[int]]:
    """Returns half of a read, for whichever thread gets to it first, and its result."""
    future: Future[int] = Future()

    def run(job: Job) -> None:
        try:
            future.set_result(read())
        except BaseException as error:  # noqa: BLE001 - half an expert must not pass for a whole one
            future.set_exception(error)

    return Job(run, is_guess=False), future


class Target(NamedTuple):
    """Blocks of a file that are read to one place."""

    start: int
    """First byte in the file."""
    num_bytes: int
    place: Bytes | None
    """Where they belong; None: their bytes belong to several places, or to none."""


def targets_of(first: int, last: int, run: Sequence[FileRange], into: Bytes) -> Iterator[Target]:
    """Cuts the blocks from ``first`` to ``last`` of a file, with sorted ranges, into those read in place and others."""
    address = into.ctypes.data
    position = first
    for item in run:
        if (address + item.offset - item.start) % BLOCK_BYTES:
            continue
        begin = -(-max(item.start, position) // BLOCK_BYTES) * BLOCK_BYTES
        end = min(_end(item), last) // BLOCK_BYTES * BLOCK_BYTES
        if begin < end:
            if position < begin:
                yield Target(position, begin - position, None)
            offset = item.offset + begin - item.start
            yield Target(begin, end - begin, into[offset : offset + end - begin])
            position = end
    if position < last:
        yield Target(position, last - position, None)


def _scatter(chunk: Bytes, position: int, run: Sequence[FileRange], into: Bytes) -> None:
    """Copies bytes, the first of them at a position of the file, to where they belong."""
    for item in run:
        first, last = max(item.start, position), min(_end(item), position + len(chunk))
        if first < last:
            offset = item.offset + first - item.start
            # numpy releases the interpreter while it copies; torch would start threads, a memoryview hold the lock.
            np.copyto(into[offset : offset + last - first], chunk[first - position : last - position])


def _split(ranges: Sequence[FileRange], num_bytes: int) -> tuple[list[FileRange], list[FileRange]]:
    """Returns the ranges of the first bytes, and of the rest."""
    first: list[FileRange] = []
    second: list[FileRange] = []
    for item in ranges:
        size = min(item.num_bytes, max(0, num_bytes))
        num_bytes -= item.num_bytes
        if size:
            first.append(replace(item, num_bytes=size))
        if size < item.num_bytes:
            rest = replace(item, start=item.start + size, num_bytes=item.num_bytes - size, offset=item.offset + size)
            second.append(rest)
    return first, second


def _runs(ranges: Sequence[FileRange]) -> Iterator[list[FileRange]]:
    """Groups ranges that lie next to each other in one file, so that they are read in one go."""
    run: list[FileRange] = []
    for item in sorted(ranges, key=lambda each: (str(each.path), each.start)):
        if run and not (item.path == run[-1].path and 0 <= item.start - _end(run[-1]) <= _MAX_GAP_BYTES):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _end(item: FileRange) -> int:
    return item.start + item.num_bytes
