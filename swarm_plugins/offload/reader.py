"""Reads experts: the byte ranges that a store names, into a buffer, with errors that name file and tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from swarm_plugins.errors import CheckpointError
from swarm_plugins.offload.direct_file import CHUNK_BYTES, Bounce, Bytes, DirectFile
from swarm_plugins.offload.types import FileRange

__all__ = ["RangeReader", "ReadCancelled"]

# Bytes between two ranges that are cheaper to read than to start another read for.
_MAX_GAP_BYTES = 64 * 1024


class ReadCancelled(Exception):
    """Nobody wants the bytes any more."""


class RangeReader:
    """Fills buffers from files. Thread-safe; files are opened when first needed and stay open."""

    def __init__(self) -> None:
        self._files: dict[Path, DirectFile] = {}
        self._lock = threading.Lock()
        self._own = threading.local()

    def read(self, ranges: Sequence[FileRange], into: Bytes, is_cancelled: Callable[[], bool]) -> int:
        """Reads one expert.

        Args:
            ranges: Its bytes.
            into: ``[num_bytes]`` of uint8, writable.
            is_cancelled: Asked between chunks.

        Returns:
            Bytes taken from disk.

        Raises:
            CheckpointError: If a file is missing, ends early, or the disk fails: names file and tensor.
            ReadCancelled: If the read was cancelled.
        """
        return sum(self._read_run(run, into, is_cancelled) for run in _runs(ranges))

    def close(self) -> None:
        """Closes all files; no read may be running."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _read_run(self, run: Sequence[FileRange], into: Bytes, is_cancelled: Callable[[], bool]) -> int:
        position, end = run[0].start, run[-1].start + run[-1].num_bytes
        bounce = self._bounce()
        while position < end:
            if is_cancelled():
                raise ReadCancelled
            try:
                file = self._file(run[0].path)
                chunk = file.read(position, min(CHUNK_BYTES, end - position), bounce)
            except OSError as error:
                raise CheckpointError(
                    f"{run[0].path}: tensor {_tensor_at(run, position)!r} cannot be read: {error.strerror or error}; "
                    "is the disk there, and the checkpoint where it was?"
                ) from error
            if not len(chunk):
                raise CheckpointError(
                    f"{run[0].path}: the file ends at byte {position}, within tensor {_tensor_at(run, position)!r} "
                    f"(bytes {run[0].start} to {end} are needed); the file is truncated: download it again"
                )
            _scatter(chunk, position, run, into)
            position += len(chunk)
        return end - run[0].start

    def _bounce(self) -> Bounce:
        bounce: Bounce | None = getattr(self._own, "bounce", None)
        if bounce is None:
            bounce = self._own.bounce = Bounce()
        return bounce

    def _file(self, path: Path) -> DirectFile:
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = DirectFile(path)
            return file


def _runs(ranges: Sequence[FileRange]) -> Iterator[list[FileRange]]:
    """Yields ranges that are read in one go, as they lie next to each other in one file."""
    run: list[FileRange] = []
    for item in sorted(ranges, key=lambda each: (str(each.path), each.start)):
        if run and not (item.path == run[-1].path and 0 <= item.start - _end(run[-1]) <= _MAX_GAP_BYTES):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _scatter(chunk: Bytes, position: int, run: Sequence[FileRange], into: Bytes) -> None:
    for item in run:
        first, last = max(item.start, position), min(_end(item), position + len(chunk))
        if first < last:
            target = item.offset + first - item.start
            # numpy releases the interpreter while it copies; torch would start threads, a memoryview hold the lock.
            np.copyto(into[target : target + last - first], chunk[first - position : last - position])


def _tensor_at(run: Sequence[FileRange], position: int) -> str:
    return next((item.tensor for item in run if position < _end(item)), run[-1].tensor)


def _end(item: FileRange) -> int:
    return item.start + item.num_bytes
