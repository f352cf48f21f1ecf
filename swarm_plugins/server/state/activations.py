"""Graphs of forward requests that are kept for the backward request to come, under a byte budget.

With a kept graph the backward needs no second forward. When the budget is full the oldest graph goes; the client then
sends its inputs again and gets the same gradients.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from swarm_plugins.errors import ConfigError
from swarm_plugins.ledger import Groups
from swarm_plugins.server.state.shares import Shares

T = TypeVar("T")

SAVED_BYTES = 2048
"""Bytes that a tensor which autograd saves counts for, besides its values: with its node in the graph it takes 1.4 KiB
(of a Llama, whose graph for one token held forty times the bytes of its values)."""


class GraphMeter:
    """Counts the bytes that a graph under construction keeps alive.

    Above ``limit_bytes`` the graph is given up: what it saves from then on is released at once. ``free_storages`` are
    addresses of storages that do not count, as they live anyway (the weights). A tensor counts ``saved_bytes`` besides.
    """

    def __init__(self, limit_bytes: int, free_storages: Collection[int], *, saved_bytes: int = SAVED_BYTES) -> None:
        self.num_bytes = 0
        self._saved_bytes = saved_bytes
        self._limit_bytes = limit_bytes
        self._free = free_storages
        self._seen: set[int] = set()

    @property
    def is_over(self) -> bool:
        """Whether the graph has outgrown the limit and is unusable."""
        return self.num_bytes > self._limit_bytes

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Adds the storages of tensors that are kept besides the graph."""
        for tensor in tensors:
            self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        self.num_bytes += self._saved_bytes
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._seen and address not in self._free:
            self._seen.add(address)
            self.num_bytes += storage.nbytes()

    def _pack(self, tensor: Tensor) -> Tensor | None:
        self._add(tensor)
        # An output that is kept with its history is a cycle, which only a backward through its node would break.
        return None if self.is_over else tensor.detach()

    @staticmethod
    def _unpack(tensor: Tensor | None) -> Tensor:
        if tensor is None:
            raise RuntimeError("the graph outgrew its budget and cannot be used")
        return tensor

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Counts everything that autograd saves inside the ``with`` block."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield


@dataclass
class _Kept(Generic[T]):
    peer: str
    expires: float
    values: tuple[T, ...] = ()
    num_bytes: int = 0


class ActivationStore(Generic[T]):
    """Keeps values by unguessable ticket; when it is full, the oldest of who holds most goes first, see `Shares`.

    Safe to use from several threads.

    Args:
        budget_bytes: Of all values.
        groups: Which peers share. None: each counts by itself.
        ttl_s: How long they are kept.
    """

    def __init__(self, budget_bytes: int, *, groups: Groups | None = None, ttl_s: float = 300.0) -> None:
        if budget_bytes < 0:
            raise ConfigError(f"the activation budget must be 0 or more bytes, got {budget_bytes}; 0 keeps nothing")
        self.budget_bytes = budget_bytes
        self.num_unkept = 0
        """Values that were too large, or gone when they were wanted, as `missed` has noted."""
        self.ttl_s = ttl_s
        self._kept: OrderedDict[str, _Kept[T]] = OrderedDict()
        """Those that expire first are first."""
        self._shares: Shares[str] = Shares(groups)
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of all kept graphs."""
        return self._shares.num_bytes

    def __len__(self) -> int:
        """Returns the number of kept graphs."""
        return len(self._kept)

    def put(self, peer: str, value: T, num_bytes: int, *, ticket: str | None = None) -> str | None:
        """Keeps a value for a peer, behind the earlier ones of a ticket if one is given.

        Returns:
            The ticket, or None if none of the values is kept: they exceed the whole budget or what values in use leave
            of it, or the earlier ones are gone.
        """
        with self._lock:
            now = time.monotonic()
            self._drop_expired(now)
            kept = _Kept[T](peer, now) if ticket is None else self._kept.get(ticket)
            if kept is None:
                return None
            if kept.num_bytes + num_bytes > self.budget_bytes:
                if ticket is not None:
                    self._drop(ticket)
                return None
            while self.used_bytes + num_bytes > self.budget_bytes and (first := self._shares.first(peer, num_bytes)):
                self._drop(first)
            if self.used_bytes + num_bytes > self.budget_bytes:
                if ticket is not None and ticket in self._kept:
                    self._drop(ticket)
                return None
            if ticket is None:
                ticket = secrets.token_urlsafe(16)
                self._kept[ticket] = kept
                self._shares.add(ticket, peer, num_bytes)
            elif ticket in self._kept:
                self._kept.move_to_end(ticket)
                self._shares.grow(ticket, num_bytes)
            else:
                return None
            kept.values, kept.num_bytes = (*kept.values, value), kept.num_bytes + num_bytes
            kept.expires = now + self.ttl_s
            return ticket

    def take(self, peer: str, ticket: str) -> tuple[T, ...] | None:
        """Returns and forgets a peer's values; None if they are gone or belong to another peer."""
        with self._lock:
            kept = self._kept.get(ticket)
            if kept is None or kept.peer != peer:
                return None
            return self._drop(ticket).values

    @contextlib.contextmanager
    def using(self, peer: str, ticket: str | None) -> Iterator[tuple[T, ...] | None]:
        """Yields a peer's values once; None if they have been taken, dropped, or belong to another peer.

        They count until the block ends: a graph stays in memory while its backward waits.
        """
        key = ticket or ""
        with self._lock:
            kept = self._kept.get(key)
            is_own = kept is not None and kept.peer == peer
            if is_own:
                del self._kept[key]
                self._shares.hold(key)
        try:
            yield kept.values if kept is not None and is_own else None
        finally:
            if is_own:
                with self._lock:
                    self._shares.let_go(key)
                    self._shares.remove(key)

    def missed(self) -> None:
        """Notes that a value which is wanted is not kept."""
        with self._lock:
            self.num_unkept += 1

    def drop_expired(self) -> None:
        """Drops values that were not taken in time."""
        with self._lock:
            self._drop_expired(time.monotonic())

    def drop_where(self, is_of_no_use: Callable[[T], bool]) -> None:
        """Drops some values."""
        with self._lock:
            for ticket in [ticket for ticket, kept in self._kept.items() if any(map(is_of_no_use, kept.values))]:
                self._drop(ticket)

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            for ticket in list(self._kept):
                self._drop(ticket)

    def _drop_expired(self, now: float) -> None:
        while self._kept and next(iter(self._kept.values())).expires <= now:
            self._drop(next(iter(self._kept)))

    def _drop(self, ticket: str) -> _Kept[T]:
        self._shares.remove(ticket)
        return self._kept.pop(ticket)
