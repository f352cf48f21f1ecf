"""Fills buffers of fast memory: from the disk, or from RAM in front of it (`cache.pinned`)."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from swarm_plugins.offload.disk.buffers import fitted, host_buffer
from swarm_plugins.offload.disk.cuda_copies import CudaCopy
from swarm_plugins.offload.disk.read_queue import Job, ReadQueue
from swarm_plugins.offload.disk.reader import RangeReader
from swarm_plugins.offload.interfaces import ExpertFormat, ExpertKey, ExpertStore


class Loader(ABC):
    """Fills buffers of fast memory with experts, which it reads as they are stored, on the threads of a queue."""

    def __init__(self, store: ExpertStore, formats: Mapping[int, ExpertFormat], queue: ReadQueue) -> None:
        self._store = store
        self._formats = formats
        self._reader = RangeReader(queue)
        self._checked: set[ExpertKey] = set()

    @abstractmethod
    def place(self, key: ExpertKey, buffer: Tensor) -> Tensor:
        """Returns the part of a buffer's memory that an expert is to be loaded into, as large as the buffer."""

    @abstractmethod
    def quick(self, key: ExpertKey, into: Tensor) -> CudaCopy | None:
        """Starts a copy that fills the buffer; None if `load` has to be called, on a reader thread."""

    @abstractmethod
    def load(self, key: ExpertKey, into: Tensor, job: Job) -> tuple[int, CudaCopy | None]:
        """Fills the buffer; called on reader threads.

        Returns:
            Bytes read from disk, and the copy that fills the buffer, if it is not filled yet.

        Raises:
            CheckpointError: If the disk fails: names file and tensor.
            ReadCancelled: If the read was cancelled.
        """

    def close(self) -> None:
        """Drops its memory and closes its files; a file that a load still reads from is closed when that has ended."""
        self._reader.close()

    def _fit(self, key: ExpertKey, buffer: Tensor) -> Tensor:
        """Returns the part of a buffer's memory that the disk can write an expert to without a copy."""
        return fitted(buffer, self._store.ranges(key), self._formats[key.layer].stored.alignment)

    def _read(self, key: ExpertKey, into: Tensor, job: Job) -> int:
        """Reads an expert and returns the bytes taken from disk; raises what `load` does."""
        num_bytes = self._reader.read(self._store.ranges(key), into.numpy(), job)
        # Once: a file that changes afterwards is not read.
        if key not in self._checked:
            self._formats[key.layer].check(into, key)
            self._checked.add(key)
        return num_bytes


class DiskLoader(Loader):
    """Reads into RAM, and converts there if the format computes with other bytes than are stored."""

    def __init__(self, store: ExpertStore, formats: Mapping[int, ExpertFormat], queue: ReadQueue) -> None:
        super().__init__(store, formats, queue)
        self._own = threading.local()

    def place(self, key: ExpertKey, buffer: Tensor) -> Tensor:
        """Returns where the disk can write without a copy."""
        form = self._formats[key.layer]
        return self._fit(key, buffer) if form.stored is form.computed else buffer

    def quick(self, key: ExpertKey, into: Tensor) -> CudaCopy | None:
        """Returns None: a disk has to be waited for."""
        return None

    def load(self, key: ExpertKey, into: Tensor, job: Job) -> tuple[int, None]:
        form = self._formats[key.layer]
        if form.stored is form.computed:
            return self._read(key, into, job), None
        stored = self._fit(key, self._staging(form.stored.num_bytes))
        num_bytes = self._read(key, stored, job)
        form.convert(stored, into)
        return num_bytes, None

    def _staging(self, num_bytes: int) -> Tensor:
        staging: Tensor | None = getattr(self._own, "staging", None)
        if staging is None or staging.numel() < num_bytes:
            staging = self._own.staging = host_buffer(num_bytes)
        return staging[:num_bytes]
