"""The experts in fast memory: lent out layer by layer, read when missing, evicted by the policy."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from swarm_plugins.errors import CapacityError, CheckpointError, SwarmError
from swarm_plugins.offload.cache.budget import choose_fast_bytes, choose_ram_bytes, holds_all
from swarm_plugins.offload.cache.guesses import Guesses
from swarm_plugins.offload.cache.layer_lru import LayerLru
from swarm_plugins.offload.cache.pinned import PinnedLoader
from swarm_plugins.offload.cache.policy import Residency
from swarm_plugins.offload.cache.slots import Slot, Slots
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.disk.buffers import BufferPool, device_buffer, host_buffer
from swarm_plugins.offload.disk.cuda_copies import CudaCopies
from swarm_plugins.offload.disk.loaders import DiskLoader, Loader
from swarm_plugins.offload.disk.read_queue import ReadQueue
from swarm_plugins.offload.interfaces import ExpertFormat, ExpertKey, ExpertStore
from swarm_plugins.offload.stats import OffloadStats

_POLICIES: Mapping[str, type[Residency]] = {"counting": Residency, "lru": LayerLru}
_alive: weakref.WeakSet[BoundedCache] = weakref.WeakSet()


def make_cache(
    store: ExpertStore, formats: Mapping[int, ExpertFormat], config: OffloadConfig, device: torch.device
) -> BoundedCache:
    """Returns a cache of a store's experts for products on a device; nothing is read or allocated yet.

    Raises:
        CapacityError: If the budget is too small to compute with.
    """
    computed = {layer: formats[layer].computed.num_bytes for layer in store.num_experts}
    fast_bytes = choose_fast_bytes(config, computed, store.num_experts, device)
    queue = ReadQueue(config.num_readers)
    if device.type != "cuda":
        config = _settled(config, is_disk_needed=True)
        pool = BufferPool(fast_bytes, host_buffer, "fast_bytes")
        return BoundedCache(store, formats, config, DiskLoader(store, formats, queue), pool, queue)
    stored = {layer: formats[layer].stored.num_bytes for layer in store.num_experts}
    ram_bytes = choose_ram_bytes(config, stored, store.num_experts)
    # Guesses then only take time from the copies that are needed (docs/benchmarks.md, "On a GPU").
    has_all = holds_all(fast_bytes, computed, store.num_experts) or holds_all(ram_bytes, stored, store.num_experts)
    config = _settled(config, is_disk_needed=not has_all)
    pool = BufferPool(fast_bytes, device_buffer(device), "fast_bytes")
    loader = PinnedLoader(store, formats, CudaCopies(device), ram_bytes, queue)
    return BoundedCache(store, formats, config, loader, pool, queue)


def _settled(config: OffloadConfig, *, is_disk_needed: bool) -> OffloadConfig:
    return config if config.prefetch is not None else replace(config, prefetch=is_disk_needed)


class BoundedCache:
    """Lends experts of a store out of a pool of fast memory, which a loader fills; an `ExpertCache`. Thread-safe."""

    def __init__(
        self,
        store: ExpertStore,
        formats: Mapping[int, ExpertFormat],
        config: OffloadConfig,
        loader: Loader,
        pool: BufferPool,
        queue: ReadQueue,
    ) -> None:
        self.config = config
        self.num_experts = dict(store.num_experts)
        layouts = {layer: formats[layer].computed for layer in self.num_experts}
        sizes = {layer: layout.num_bytes for layer, layout in layouts.items()}
        self._store = store
        self._loader = loader
        # Re-entrant: a collected generator gives back what it holds in whichever thread the collector runs.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pool = pool
        self._policy = _POLICIES[config.policy](self.num_experts, sizes, pool.limit_bytes)
        self._queue = queue
        self._stats = OffloadStats()
        self._uses = {layer: [0] * count for layer, count in self.num_experts.items()}
        self._first_layer = min(self.num_experts, default=0)
        self._first_s: float | None = None
        self._slots = Slots(self._policy, pool, layouts, loader, queue, self._stats, self._changed)
        self._guesses = Guesses(self._slots, self._stats)
        self._loans: list[_Loan] = []
        self._is_closed = False
        self._is_forked = False
        _alive.add(self)
        self.on_asked: Callable[[int], bool] | None = None
        """Called with a layer once its experts have been asked of the disk; returns whether it made a guess."""

    @property
    def unused_bytes(self) -> int:
        """Bytes of the budget that are not allocated yet."""
        return self._pool.limit_bytes - self._pool.allocated_bytes

    def borrow(self, layer: int, experts: Sequence[int]) -> Generator[tuple[int, Mapping[str, Tensor]], None, None]:
        """Yields each of the experts once, see `ExpertCache.borrow`.

        Raises:
            CheckpointError: If an expert cannot be read, or not in time: names file and tensor.
            CapacityError: If others hold all the memory, or the system has none left for the budget.
            SwarmError: If the cache is closed, or the process was forked.
        """
        loan = _Loan(layer)
        ended_well = False
        try:
            self._begin(loan, experts)
            if self.on_asked is not None and self.on_asked(layer):
                self._go_on(loan)
            while loan.ready or loan.waiting or loan.missing:
                if not loan.ready:
                    self._await(loan)
                slot = loan.ready[0]
                if slot.arrival is not None and slot.arrival.before_use():
                    slot.arrival = None
                yield slot.key.expert, slot.views
                with self._lock:
                    loan.used.append(loan.ready.popleft())
                    if loan.missing:
                        self._go_on(loan)
            ended_well = True
        except GeneratorExit:
            ended_well = True
            raise
        finally:
            loan.is_over = True
            self._end(loan, ended_well=ended_well)

    def check_picks(self, picks: int) -> None:
        """Raises CapacityError if the paper's policy keeps fewer experts of a layer than a token takes."""
        policy = self._policy
        if isinstance(policy, LayerLru) and policy.num_per_layer < picks:
            raise CapacityError(
                f'policy="lru" with {policy.budget_bytes} bytes keeps {policy.num_per_layer} of the experts of each '
                f'layer, but a token takes {picks}; raise fast_bytes, take a lower expert_bits, or policy="counting"'
            )

    def guess(self, layer: int, experts: Sequence[int]) -> None:
        """Announces which experts a later layer will probably need, best guess first; returns at once.

        Reading starts when the next layer that asks has everything on its way.
        """
        with self._lock:
            if not self._is_closed:
                self._guesses.plan(layer, experts)

    def is_complete(self, layer: int) -> bool:
        """Returns whether all experts of a layer are in fast memory or on their way there."""
        return len(self._slots.of(layer)) == self.num_experts[layer]

    def stats(self) -> OffloadStats:
        with self._lock:
            return replace(self._stats, uses={layer: tuple(uses) for layer, uses in self._uses.items()})

    def count_tokens(self, num_tokens: int) -> None:
        """Counts rows that go through the first layer with experts."""
        with self._lock:
            self._stats.tokens += num_tokens

    def close(self) -> None:
        """Ends the reader threads and frees the memory; may be called again. Lent experts stay readable."""
        if self._queue.is_own_thread():
            # The collector of a dropped model runs here, in the middle of a read.
            self._is_closed = True
            self._queue.stop()
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._queue.close()
        with self._lock:
            self._slots.clear()
        self._loader.close()

    def close_in_child(self) -> None:
        """Closes the cache in a forked process, which has no reader threads and perhaps a locked lock.

        Its memory is wiped there, except small experts.
        """
        self._is_closed = self._is_forked = True
        self._lock = threading.RLock()

    def _check_open(self) -> None:
        if self._is_forked:
            raise SwarmError(
                "the experts of a model cannot be read in a process that was forked after the model was loaded: load "
                "the model in the child process"
            )
        if self._is_closed:
            raise SwarmError("the cache of experts is closed, its model was unloaded; load the model again")

    def _begin(self, loan: _Loan, experts: Sequence[int]) -> None:
        begin_s = time.perf_counter()
        with self._lock:
            self._check_open()
            if any(other.is_over for other in self._loans):
                self._heal()
            self._loans.append(loan)
            self._guesses.settle(loan.layer, experts)
            slots = self._slots.of(loan.layer)
            for expert in experts:
                slot = slots.get(expert)
                if slot is not None and slot.is_ready:
                    self._policy.hold(slot.key)
                    loan.ready.append(slot)
                else:
                    loan.missing.append(expert)
            self._policy.use(loan.layer, experts)
            self._count(loan, experts, begin_s)
            self._ask(loan)

    def _count(self, loan: _Loan, experts: Sequence[int], begin_s: float) -> None:
        stats, uses = self._stats, self._uses[loan.layer]
        if self._first_s is None:
            self._first_s = begin_s
        stats.passes += loan.layer == self._first_layer
        stats.misses += len(loan.missing)
        stats.hits += len(loan.ready)
        for expert in experts:
            uses[expert] += 1

    def _end(self, loan: _Loan, *, ended_well: bool) -> None:
        """Gives back what a loan holds; if that is interrupted, the loan stays on the list, for `_heal`."""
        with self._lock:
            if self._is_closed or loan not in self._loans:
                return
            if ended_well:
                for slot in loan.held():
                    self._slots.release(slot)
                self._loans.remove(loan)
            else:
                self._heal()
            if self._first_s is not None:
                self._stats.seconds = time.perf_counter() - self._first_s

    def _heal(self) -> None:
        """Rebuilds bookkeeping after an exception: Ctrl-C may interrupt any update."""
        living = [loan for loan in self._loans if not loan.is_over]
        self._slots.heal([*self._guesses.held(), *(slot for loan in living for slot in loan.held())])
        self._loans = living

    def _ask(self, loan: _Loan) -> None:
        """Starts reading missing experts, a few at a time: more would evict early what could still be used."""
        while loan.missing and len(loan.waiting) < 2 * self.config.num_readers:
            slot = self._slots.fetch(ExpertKey(loan.layer, loan.missing[0]), is_guess=False)
            if slot is None:
                break
            loan.missing.popleft()
            (loan.ready if slot.is_ready else loan.waiting).append(slot)
        if not loan.missing:
            self._guesses.start()

    def _go_on(self, loan: _Loan) -> None:
        with self._lock:
            self._check_open()
            while loan.used:
                self._slots.release(loan.used.pop())
            self._ask(loan)

    def _await(self, loan: _Loan) -> None:
        """Waits until one more of the experts has arrived."""
        begin_s = time.perf_counter()
        deadline = begin_s + self.config.read_timeout_s
        with self._lock:
            while True:
                self._check_open()
                had_room = bool(loan.waiting)
                self._ask(loan)
                loan.collect()
                if loan.ready:
                    break
                if not loan.waiting and self._guesses.drop():
                    # Guesses took the room.
                    continue
                if loan.waiting and not had_room:
                    # The time until now was not the disk's.
                    deadline = time.perf_counter() + self.config.read_timeout_s
                left = deadline - time.perf_counter()
                if left <= 0:
                    raise self._too_late(loan)
                self._changed.wait(left)
            self._stats.stall_s += time.perf_counter() - begin_s

    def _too_late(self, loan: _Loan) -> Exception:
        if not loan.waiting:
            return CapacityError(
                f"no room for expert {loan.missing[0]} of layer {loan.layer} within {self.config.read_timeout_s} s: "
                f"all {self._policy.budget_bytes} bytes of fast_bytes are in use by other threads; raise fast_bytes"
            )
        key = loan.waiting[0].key
        first = self._store.ranges(key)[0]
        return CheckpointError(
            f"{first.path}: tensor {first.tensor!r} (expert {key.expert} of layer {key.layer}) was not read within "
            f"{self.config.read_timeout_s} s; the disk hangs or is too slow: raise read_timeout_s"
        )


@dataclass(slots=True, eq=False)
class _Loan:
    """What one call of `borrow` still has to yield."""

    layer: int
    ready: deque[Slot] = field(default_factory=deque)
    missing: deque[int] = field(default_factory=deque)
    """Experts whose read has not started."""
    waiting: list[Slot] = field(default_factory=list)
    used: list[Slot] = field(default_factory=list)
    """Yielded, still held."""
    is_over: bool = False

    def held(self) -> list[Slot]:
        return [*self.used, *self.ready, *self.waiting]

    def collect(self) -> None:
        """Moves arrived experts from `waiting` to `ready`; raises the error of a failed read."""
        for slot in self.waiting:
            if slot.error is not None:
                raise slot.error
        self.ready.extend(slot for slot in self.waiting if slot.is_ready)
        self.waiting = [slot for slot in self.waiting if not slot.is_ready]


def _close_in_child() -> None:
    for cache in list(_alive):
        cache.close_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
