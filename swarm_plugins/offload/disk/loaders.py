"""Where an expert comes from when it is not in fast memory: the disk, or RAM in front of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from swarm_plugins.offload.disk.buffers import host_buffer
from swarm_plugins.offload.disk.in_place import fitted
from swarm_plugins.offload.disk.read_queue import Job, ReadQueue
from swarm_plugins.offload.disk.reader import RangeReader
from swarm_plugins.offload.formats.experts import check_scales
from swarm_plugins.offload.interfaces import ExpertFormat, ExpertKey, ExpertStore

__all__ = ["Arrival", "DiskLoader", "Loader"]


class Arrival(Protocol):
    """A copy to a device that has been started."""

    def before_use(self) -> bool:
        """Makes the stream that computes wait for the copy.

        Returns:
            Whether the copy has ended, so that nobody has to ask again.
        """
        ...


class Loader(Protocol):
    """Fills a buffer of fast memory."""

    def place(self, key: ExpertKey, buffer: Tensor) -> Tensor:
        """Returns the part of a buffer's memory that an expert is to be loaded into, as large as the buffer."""
        ...

    def quick(self, key: ExpertKey, into: Tensor) -> Arrival | None:
        """Starts filling the buffer without any waiting, if that is possible; called by whoever borrows.

        Returns:
            The copy that fills it; None if `load` has to be called, on a reader thread.
        """
        ...

    def load(self, key: ExpertKey, into: Tensor, job: Job) -> tuple[int, Arrival | None]:
        """Fills the buffer; called on reader threads.

        Returns:
            Bytes read from disk, and the copy that fills the buffer, if it has not been filled yet.

        Raises:
            CheckpointError: If the disk fails: names file and tensor.
            ReadCancelled: If the read was cancelled.
        """
        ...

    def close(self) -> None:
        """Drops its memory and closes its files, those that a load still reads from when it has ended."""
        ...


class DiskLoader:
    """Reads into RAM, and converts there where the format computes with other bytes than are stored.

    Args:
        store: Says where the bytes are.
        formats: What they mean, by layer.
        queue: The threads that load.
    """

    def __init__(self, store: ExpertStore, formats: Mapping[int, ExpertFormat], queue: ReadQueue) -> None:
        self._store = store
        self._formats = formats
        self._reader = RangeReader(queue)
        self._own = threading.local()

    def place(self, key: ExpertKey, buffer: Tensor) -> Tensor:
        """Returns where the disk can write without a copy."""
        expert_format = self._formats[key.layer]
        if expert_format.stored is not expert_format.computed:
            return buffer
        return fitted(buffer, self._store.ranges(key), expert_format.stored.alignment)

    def quick(self, key: ExpertKey, into: Tensor) -> Arrival | None:
        """Returns None: a disk has to be waited for."""
        return None

    def load(self, key: ExpertKey, into: Tensor, job: Job) -> tuple[int, None]:
        """Reads an expert from disk, see `Loader.load`."""
        expert_format = self._formats[key.layer]
        ranges = self._store.ranges(key)
        if expert_format.stored is expert_format.computed:
            num_bytes = self._reader.read(ranges, into.numpy(), job)
            check_scales(expert_format.stored, into, key)
            return num_bytes, None
        stored = fitted(self._staging(expert_format.stored.num_bytes), ranges, expert_format.stored.alignment)
        num_bytes = self._reader.read(ranges, stored.numpy(), job)
        check_scales(expert_format.stored, stored, key)
        expert_format.convert(stored, into)
        return num_bytes, None

    def close(self) -> None:
        """Closes the files."""
        self._reader.close()

    def _staging(self, num_bytes: int) -> Tensor:
        staging: Tensor | None = getattr(self._own, "staging", None)
        if staging is None or staging.numel() < num_bytes:
            staging = self._own.staging = host_buffer(num_bytes)
        return staging[:num_bytes]
