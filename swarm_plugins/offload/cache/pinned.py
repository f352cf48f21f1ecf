"""RAM between the disk and a device: experts as they are stored, in page-locked memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from swarm_plugins.errors import CapacityError
from swarm_plugins.offload.cache.policy import Residency
from swarm_plugins.offload.disk.buffers import BufferPool
from swarm_plugins.offload.disk.cuda_copies import CudaCopies, CudaCopy
from swarm_plugins.offload.disk.loaders import Loader
from swarm_plugins.offload.disk.read_queue import Job, ReadQueue
from swarm_plugins.offload.interfaces import ExpertFormat, ExpertKey, ExpertStore


class _Kept(NamedTuple):
    buffer: Tensor
    """As the pool gave it."""
    expert: Tensor
    """The part of its memory that the expert fills."""


class PinnedLoader(Loader):
    """Copies experts from RAM, after reading missing ones into it.

    Experts beyond ``ram_bytes`` pass through a buffer of their reader.
    """

    def __init__(
        self,
        store: ExpertStore,
        formats: Mapping[int, ExpertFormat],
        copies: CudaCopies,
        ram_bytes: int,
        queue: ReadQueue,
    ) -> None:
        super().__init__(store, formats, queue)
        self._copies = copies
        self._lock = threading.Lock()
        stored = {layer: formats[layer].stored.num_bytes for layer in store.num_experts}
        self._policy = Residency(store.num_experts, stored, ram_bytes)
        self._pool = BufferPool(ram_bytes, copies.allocate, "ram_bytes")
        self._kept: dict[ExpertKey, _Kept] = {}
        # The last copy out of each buffer, by the address of its memory: it must end before that is filled again.
        self._last: dict[int, CudaCopy] = {}
        self._spare: list[Tensor] = []
        self._largest = max(stored.values(), default=0)

    def place(self, key: ExpertKey, buffer: Tensor) -> Tensor:
        """Returns the buffer: no disk writes to it."""
        return buffer

    def quick(self, key: ExpertKey, into: Tensor) -> CudaCopy | None:
        """Starts a copy from RAM if the expert is there."""
        with self._lock:
            # Also for copies that a reader thread starts later: all copies run in order.
            self._copies.follow()
            self._policy.use(key.layer, [key.expert])
            kept = self._kept.get(key)
            return None if kept is None else self._start(key, kept.expert, into)

    def load(self, key: ExpertKey, into: Tensor, job: Job) -> tuple[int, CudaCopy | None]:
        """Reads an expert from disk into RAM and starts the copy, see `Loader.load`."""
        buffer, is_kept = self._buffer(key)
        try:
            expert = self._fit(key, buffer[: self._formats[key.layer].stored.num_bytes])
            num_bytes = self._read(key, expert, job)
            with self._lock:
                arrival = self._start(key, expert, into)
        except BaseException:
            self._give_back(key, buffer, is_kept=is_kept)
            raise
        with self._lock:
            if is_kept:
                self._policy.release(key)
                self._kept[key] = _Kept(buffer, expert)
            else:
                self._spare.append(buffer)
        return num_bytes, arrival

    def close(self) -> None:
        """Waits for the copies under way, drops the memory and closes the files."""
        with self._lock:
            for copy in self._last.values():
                copy.wait()
            self._last.clear()
            self._kept.clear()
            self._spare.clear()
        super().close()

    def _buffer(self, key: ExpertKey) -> tuple[Tensor, bool]:
        """Returns a buffer to read into, and whether it stays in RAM."""
        with self._lock:
            kept = self._admit(key)
            buffer = kept
            if buffer is None:
                buffer = self._spare.pop() if self._spare else self._copies.allocate(self._largest)
            last = self._last.pop(_address(buffer), None)
        if last is not None:
            last.wait()
        return buffer, kept is not None

    def _admit(self, key: ExpertKey) -> Tensor | None:
        victims = self._policy.admit(key)
        if victims is None:
            return None
        for victim in victims:
            self._pool.give(self._kept.pop(victim).buffer)
        try:
            buffer = self._pool.take(self._formats[key.layer].stored.num_bytes)
        except CapacityError:
            self._policy.drop(key)
            raise
        self._policy.hold(key)
        return buffer

    def _give_back(self, key: ExpertKey, buffer: Tensor, *, is_kept: bool) -> None:
        with self._lock:
            if is_kept:
                self._policy.release(key)
                self._policy.drop(key)
                self._pool.give(buffer)
            else:
                self._spare.append(buffer)

    def _start(self, key: ExpertKey, source: Tensor, into: Tensor) -> CudaCopy:
        form = self._formats[key.layer]
        convert = None if form.stored is form.computed else form.convert
        copy = self._last[_address(source)] = self._copies.start(source, into, convert)
        return copy


def _address(buffer: Tensor) -> int:
    return buffer.untyped_storage().data_ptr()
