"""Adapters that a server holds, by digest, under a byte budget."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.errors import CapacityError, ConfigError
from swarm_plugins.server.failures import BadRequestError, RequestError

MAX_ADAPTERS = 256
"""Most adapters in one request."""

OBJECT_BYTES = 2048
"""Bytes that an adapter, each of its layers and each of its tensors count for, besides the tensors' values: as Python
objects a layer takes up to 1.5 KiB, a tensor 0.5 KiB. Layers may share tensors, and tensors may be empty."""


_Key = tuple[str | None, str]
"""Who has uploaded an adapter (None: the host publishes it), and its digest."""


@dataclass(frozen=True)
class _Held:
    adapter: LoadedAdapter
    num_bytes: int


class _Shelf:
    """What one peer has uploaded, or all have: sums, and what may go, so that no upload looks at all that is kept."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.idle_bytes = 0
        self.idle: OrderedDict[_Key, int] = OrderedDict()
        """Sizes of adapters that are not in use; those used longest ago first."""

    def lay(self, key: _Key, num_bytes: int) -> None:
        """Notes that an adapter is in use no more."""
        self.idle[key] = num_bytes
        self.idle_bytes += num_bytes

    def take(self, key: _Key) -> None:
        """Notes that an adapter is in use."""
        self.idle_bytes -= self.idle.pop(key)


class AdapterStore:
    """Holds adapters; the least recently used go first, those in use or published stay.

    A digest finds an adapter only for the peer that has uploaded it: another that knows or guesses the digest can
    neither compute with it nor learn that it is here. Used from the event loop only.
    """

    def __init__(self, budget_bytes: int, *, peer_bytes: int | None = None, object_bytes: int = OBJECT_BYTES) -> None:
        if budget_bytes < 0:
            raise ConfigError(f"the adapter budget must be 0 or more bytes, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.peer_bytes = budget_bytes // 2 if peer_bytes is None else peer_bytes
        self.object_bytes = object_bytes
        self._held: dict[_Key, _Held] = {}
        self._in_use: Counter[_Key] = Counter()
        self._all = _Shelf()
        self._of: dict[str, _Shelf] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of all uploaded adapters; published ones are the host's own."""
        return self._all.num_bytes

    def size_of(self, adapter: LoadedAdapter) -> int:
        """Returns the bytes that an adapter counts for."""
        num_objects = 1 + len(adapter.spec.layers) + len(adapter.tensors)
        return adapter.num_bytes + self.object_bytes * num_objects

    def publish(self, adapter: LoadedAdapter) -> None:
        """Holds the host's own adapter as long as the server lives, outside the budget."""
        self._held[None, adapter.digest] = _Held(adapter, adapter.num_bytes)

    def put(self, peer: str, adapter: LoadedAdapter) -> None:
        """Holds an adapter that ``peer`` has uploaded.

        Raises:
            CapacityError: If it does not fit with the adapters in use, or is larger than one peer's share.
        """
        key = (peer, adapter.digest)
        if key in self._held:
            for shelf in self._shelves(key):
                if key in shelf.idle:
                    shelf.idle.move_to_end(key)
            return
        size = self.size_of(adapter)
        if size > self.peer_bytes:
            raise CapacityError(
                f"the adapter takes {size} bytes, one client may hold {self.peer_bytes} on this server: "
                "lower its rank or adapt fewer modules, or use a server that allows more"
            )
        self._make_room(size, self.peer_bytes, self._of.get(peer, _Shelf()))
        self._make_room(size, self.budget_bytes, self._all)
        self._held[key] = _Held(adapter, size)
        self._of.setdefault(peer, _Shelf())
        for shelf in self._shelves(key):
            shelf.num_bytes += size
            shelf.lay(key, size)

    def clear(self) -> None:
        """Drops all uploaded adapters that are not in use."""
        while self._all.idle:
            self._drop(next(iter(self._all.idle)))

    @contextlib.contextmanager
    def using(self, peer: str, digests: Sequence[str]) -> Iterator[tuple[LoadedAdapter, ...]]:
        """Yields adapters of a peer, or published ones, and holds them while the ``with`` block runs.

        Raises:
            RequestError: ``unknown_adapter`` if one is not held, ``bad_request`` if too much is named.
        """
        if len(digests) > MAX_ADAPTERS:
            raise BadRequestError(f"{len(digests)} adapters in one request, the limit is {MAX_ADAPTERS}")
        keys = [self._key(peer, digest) for digest in digests]
        self._check_repeated(keys)
        adapters = tuple(self._held[key].adapter for key in keys)
        distinct = dict.fromkeys(keys)
        for key in distinct:
            self._begin_use(key)
        try:
            yield adapters
        finally:
            for key in distinct:
                self._end_use(key)

    def _key(self, peer: str, digest: str) -> _Key:
        for key in ((peer, digest), (None, digest)):
            if key in self._held:
                return key
        raise RequestError(
            "unknown_adapter", f"adapter {digest[:64]!r} is not held here for this client: upload it and ask again"
        )

    def _check_repeated(self, keys: Sequence[_Key]) -> None:
        """Refuses to name a large adapter many times: gradients would take far more memory than adapters."""
        # Some repetition is fine: two adapters of a client may be equal on a span (new ones, or without modules there).
        repeated = sum(self._held[key].num_bytes for key in keys)
        repeated -= sum(self._held[key].num_bytes for key in set(keys))
        if repeated > self.peer_bytes:
            raise BadRequestError(
                f"the request names adapters more than once, {repeated} bytes in all, the limit is {self.peer_bytes}: "
                "name each once, and the rows that use it",
            )

    def _shelves(self, key: _Key) -> tuple[_Shelf, ...]:
        owner = key[0]
        return () if owner is None else (self._all, self._of[owner])

    def _begin_use(self, key: _Key) -> None:
        self._in_use[key] += 1
        if self._in_use[key] == 1:
            for shelf in self._shelves(key):
                shelf.take(key)

    def _end_use(self, key: _Key) -> None:
        self._in_use[key] -= 1
        if not self._in_use[key]:
            del self._in_use[key]
            for shelf in self._shelves(key):
                shelf.lay(key, self._held[key].num_bytes)

    def _make_room(self, size: int, limit: int, shelf: _Shelf) -> None:
        """Drops the oldest adapters of a shelf until ``size`` bytes fit under ``limit``."""
        if shelf.num_bytes - shelf.idle_bytes + size > limit:
            raise CapacityError(
                f"no room for an adapter of {size} bytes: {shelf.num_bytes} of {limit} bytes are held and in use; "
                "try again when running requests have ended, or use another server"
            )
        while shelf.num_bytes + size > limit:
            self._drop(next(iter(shelf.idle)))

    def _drop(self, key: _Key) -> None:
        size = self._held.pop(key).num_bytes
        for shelf in self._shelves(key):
            shelf.take(key)
            shelf.num_bytes -= size
        owner = key[0]
        if owner is not None and not self._of[owner].num_bytes:
            del self._of[owner]
