"""The buffers of fast memory with the experts that are in them or on their way there.

All methods are called with the owner's lock held, except `Slots._run`, which a reader thread calls.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_plugins.errors import CapacityError, CheckpointError, SwarmError
from swarm_plugins.offload.cache.policy import Residency
from swarm_plugins.offload.disk.buffers import BufferPool
from swarm_plugins.offload.disk.cuda_copies import CudaCopy
from swarm_plugins.offload.disk.loaders import Loader
from swarm_plugins.offload.disk.read_queue import Job, ReadQueue
from swarm_plugins.offload.disk.reader import ReadCancelled
from swarm_plugins.offload.interfaces import BufferLayout, ExpertKey
from swarm_plugins.offload.stats import OffloadStats


@dataclass(slots=True, eq=False)
class Slot:
    """One expert in fast memory, or on its way there."""

    key: ExpertKey
    buffer: Tensor
    """As the pool gave it."""
    place: Tensor
    """The part of its memory that the expert fills."""
    views: Mapping[str, Tensor]
    is_ready: bool = False
    job: Job | None = None
    """The read that fills it, until it has ended."""
    error: Exception | None = None
    arrival: CudaCopy | None = None
    """The copy to the device, if it may still be under way."""


class Slots:
    """Fills and empties slots of a pool as a policy decides.

    ``changed``, with the owner's lock, is notified when a read has ended or a hold was given back.
    """

    def __init__(
        self,
        policy: Residency,
        pool: BufferPool,
        layouts: Mapping[int, BufferLayout],
        loader: Loader,
        queue: ReadQueue,
        stats: OffloadStats,
        changed: threading.Condition,
    ) -> None:
        self._policy = policy
        self._pool = pool
        self._layouts = layouts
        self._loader = loader
        self._queue = queue
        self._stats = stats
        self._changed = changed
        self._slots: dict[int, dict[int, Slot]] = {layer: {} for layer in layouts}

    def of(self, layer: int) -> Mapping[int, Slot]:
        """Returns the slots of a layer's experts that are in fast memory or on their way there."""
        return self._slots[layer]

    def fetch(self, key: ExpertKey, *, is_guess: bool) -> Slot | None:
        """Returns the slot of an expert, held for the caller, after starting to fill one; None if there is no room now.

        Raises:
            CapacityError: If the system has no memory left for the budget.
        """
        slot = self._slots[key.layer].get(key.expert)
        if slot is None:
            slot = self._admit(key, is_guess=is_guess)
            if slot is None:
                return None
            self._start(slot, is_guess=is_guess)
        elif slot.job is not None:
            # On its way for a guess, perhaps being cancelled.
            slot.job.is_cancelled = False
            if not is_guess:
                self._queue.need(slot.job)
        self._policy.hold(key)
        return slot

    def release(self, slot: Slot) -> None:
        """Ends the hold of `fetch`."""
        self._policy.release(slot.key)
        # A thread may wait for room; a slot that only a guess still holds counts as room.
        self._changed.notify_all()

    def cancel_guess(self, slot: Slot) -> None:
        """Stops a read unless it has become needed."""
        if slot.job is not None and slot.job.is_guess and self._queue.cancel(slot.job):
            self._end(slot, ReadCancelled())

    def heal(self, held: Sequence[Slot]) -> None:
        """Rebuilds bookkeeping after an interrupted update; callers hold these slots, each once per hold."""
        lost = []
        for slot in [slot for slots in self._slots.values() for slot in slots.values()]:
            if slot.job is not None and not self._queue.has(slot.job):
                slot.job = None
            if slot.is_ready or (slot.error is None and slot.job is not None):
                continue
            if slot.error is None and slot in held:
                lost.append(slot)
            else:
                del self._slots[slot.key.layer][slot.key.expert]
        living = [slot for slots in self._slots.values() for slot in slots.values()]
        reading = [slot for slot in living if slot.job is not None]
        self._policy.restore([slot.key for slot in living], [slot.key for slot in (*held, *reading)])
        self._pool.recount(sum(slot.buffer.numel() for slot in living))
        for slot in lost:
            # Another thread waits for it, and finds the error there if there is one.
            with suppress(Exception):
                self._start(slot, is_guess=False)
        with suppress(CapacityError):
            self._queue.wake()
        self._changed.notify_all()

    def clear(self) -> None:
        for slots in self._slots.values():
            for slot in list(slots.values()):
                self._forget(slot)
        self._pool.clear()

    def _admit(self, key: ExpertKey, *, is_guess: bool) -> Slot | None:
        victims = self._policy.admit(key, is_guess=is_guess)
        if victims is None:
            return None
        for victim in victims:
            self._pool.give(self._slots[victim.layer].pop(victim.expert).buffer)
        layout = self._layouts[key.layer]
        # Allocates outside inference mode; a backward pass may reuse this buffer.
        with torch.inference_mode(False):
            try:
                buffer = self._pool.take(layout.num_bytes)
            except BaseException:
                self._policy.drop(key)
                raise
            place = self._loader.place(key, buffer)
            slot = self._slots[key.layer][key.expert] = Slot(key, buffer, place, layout.views(place))
        return slot

    def _start(self, slot: Slot, *, is_guess: bool) -> None:
        try:
            slot.arrival = self._loader.quick(slot.key, slot.place)
            if slot.arrival is not None:
                slot.is_ready = True
                return
            # The reader writes to the buffer: it must not be given away.
            self._policy.hold(slot.key)
            slot.job = Job(lambda job: self._run(slot, job), is_guess=is_guess)
            self._queue.submit(slot.job)
        except Exception as error:
            if slot.job is None:
                slot.error = error
                self._forget(slot)
            else:
                self._end(slot, error)
            raise

    def _run(self, slot: Slot, job: Job) -> None:
        num_bytes, arrival, error = 0, None, None
        try:
            num_bytes, arrival = self._loader.load(slot.key, slot.place, job)
        except (SwarmError, ReadCancelled) as caught:
            error = caught
        except Exception as caught:  # noqa: BLE001 - borrowers would wait forever for a dead reader
            error = CheckpointError(f"expert {slot.key.expert} of layer {slot.key.layer} cannot be loaded: {caught!r}")
            error.__cause__ = caught
        with self._changed:
            self._stats.bytes_read += num_bytes
            slot.arrival = arrival
            self._end(slot, error)

    def _end(self, slot: Slot, error: Exception | None) -> None:
        job = slot.job
        if job is None:
            return
        if isinstance(error, ReadCancelled) and not job.is_cancelled:
            # It became needed after all, between the cancellation and now.
            slot.job = Job(job.run, is_guess=job.is_guess)
            self._queue.submit(slot.job)
            return
        slot.job = None
        self._policy.release(slot.key)
        slot.error = error
        slot.is_ready = error is None
        if error is not None and self._slots[slot.key.layer].get(slot.key.expert) is slot:
            self._forget(slot)
        self._changed.notify_all()

    def _forget(self, slot: Slot) -> None:
        del self._slots[slot.key.layer][slot.key.expert]
        self._policy.drop(slot.key)
        self._pool.give(slot.buffer)
