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

MIN_HELD_BYTES = 4096
"""Bytes an adapter counts for at least: its structure and its place in the store take memory too."""


_Key = tuple[str | None, str]
"""Who has uploaded an adapter (None: the host publishes it), and its digest."""


@dataclass(frozen=True)
class _Held:
    adapter: LoadedAdapter
    num_bytes: int


class AdapterStore:
    """Holds adapters; the least recently used go first, those in use or published stay.

    A digest finds an adapter only for the peer that has uploaded it: another that knows or guesses the digest can
    neither compute with it nor learn that it is here. Used from the event loop only.
    """

    def __init__(
        self, budget_bytes: int, *, peer_bytes: int | None = None, min_held_bytes: int = MIN_HELD_BYTES
    ) -> None:
        if budget_bytes < 0:
            raise ConfigError(f"the adapter budget must be 0 or more bytes, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.peer_bytes = budget_bytes // 2 if peer_bytes is None else peer_bytes
        self.min_held_bytes = min_held_bytes
        self._held: OrderedDict[_Key, _Held] = OrderedDict()
        self._in_use: Counter[_Key] = Counter()

    @property
    def used_bytes(self) -> int:
        """Bytes of all uploaded adapters; published ones are the host's own."""
        # A copy: a thread that serves metrics asks too.
        return sum(held.num_bytes for (owner, _), held in list(self._held.items()) if owner is not None)

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
            self._held.move_to_end(key)
            return
        size = max(adapter.num_bytes, self.min_held_bytes)
        if size > self.peer_bytes:
            raise CapacityError(
                f"the adapter has {size} bytes, one client may hold {self.peer_bytes} on this server: "
                "lower its rank or adapt fewer modules, or use a server that allows more"
            )
        self._make_room(size, self.peer_bytes, owner=peer)
        self._make_room(size, self.budget_bytes, owner=None)
        self._held[key] = _Held(adapter, size)

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
        self._in_use.update(keys)
        for key in keys:
            self._held.move_to_end(key)
        try:
            yield adapters
        finally:
            self._in_use.subtract(keys)
            self._in_use += Counter()  # forgets the zeros

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

    def _make_room(self, size: int, limit: int, *, owner: str | None) -> None:
        """Drops the oldest adapters (of ``owner``, if given) until ``size`` bytes fit under ``limit``."""
        mine = [(key, held) for key, held in self._held.items() if key[0] is not None and owner in (None, key[0])]
        used = sum(held.num_bytes for _, held in mine)
        idle = [(key, held) for key, held in mine if not self._in_use[key]]
        if used - sum(held.num_bytes for _, held in idle) + size > limit:
            raise CapacityError(
                f"no room for an adapter of {size} bytes: {used} of {limit} bytes are held and in use; "
                "try again when running requests have ended, or use another server"
            )
        for key, held in idle:
            if used + size <= limit:
                return
            del self._held[key]
            used -= held.num_bytes
