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


@dataclass(frozen=True)
class _Held:
    adapter: LoadedAdapter
    owner: str | None
    num_bytes: int


class AdapterStore:
    """Holds adapters; the least recently used go first, those in use or published stay.

    Used from the event loop only.
    """

    def __init__(
        self, budget_bytes: int, *, peer_bytes: int | None = None, min_held_bytes: int = MIN_HELD_BYTES
    ) -> None:
        if budget_bytes < 0:
            raise ConfigError(f"the adapter budget must be 0 or more bytes, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.peer_bytes = budget_bytes // 2 if peer_bytes is None else peer_bytes
        self.min_held_bytes = min_held_bytes
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._in_use: Counter[str] = Counter()

    @property
    def used_bytes(self) -> int:
        """Bytes of all uploaded adapters; published ones are the host's own."""
        return sum(held.num_bytes for held in self._held.values() if held.owner is not None)

    def publish(self, adapter: LoadedAdapter) -> None:
        """Holds the host's own adapter as long as the server lives, outside the budget."""
        self._held[adapter.digest] = _Held(adapter, None, adapter.num_bytes)

    def put(self, peer: str, adapter: LoadedAdapter) -> None:
        """Holds an adapter that ``peer`` has uploaded.

        Raises:
            CapacityError: If it does not fit with the adapters in use, or is larger than one peer's share.
        """
        if adapter.digest in self._held:
            self._held.move_to_end(adapter.digest)
            return
        size = max(adapter.num_bytes, self.min_held_bytes)
        if size > self.peer_bytes:
            raise CapacityError(
                f"the adapter has {size} bytes, one client may hold {self.peer_bytes} on this server: "
                "lower its rank or adapt fewer modules, or use a server that allows more"
            )
        self._make_room(size, self.peer_bytes, owner=peer)
        self._make_room(size, self.budget_bytes, owner=None)
        self._held[adapter.digest] = _Held(adapter, peer, size)

    @contextlib.contextmanager
    def using(self, digests: Sequence[str]) -> Iterator[tuple[LoadedAdapter, ...]]:
        """Yields the adapters and holds them while the ``with`` block runs.

        Raises:
            RequestError: ``unknown_adapter`` if one is not held, ``bad_request`` if too much is named.
        """
        if len(digests) > MAX_ADAPTERS:
            raise BadRequestError(f"{len(digests)} adapters in one request, the limit is {MAX_ADAPTERS}")
        for digest in digests:
            if digest not in self._held:
                raise RequestError(
                    "unknown_adapter", f"adapter {digest[:64]!r} is not held here: upload it and ask again"
                )
        self._check_repeated(digests)
        adapters = tuple(self._held[digest].adapter for digest in digests)
        self._in_use.update(digests)
        for digest in digests:
            self._held.move_to_end(digest)
        try:
            yield adapters
        finally:
            self._in_use.subtract(digests)
            self._in_use += Counter()  # forgets the zeros

    def _check_repeated(self, digests: Sequence[str]) -> None:
        """Refuses to name a large adapter many times: gradients would take far more memory than adapters."""
        # Some repetition is fine: two adapters of a client may be equal on a span (new ones, or without modules there).
        repeated = sum(self._held[digest].num_bytes for digest in digests)
        repeated -= sum(self._held[digest].num_bytes for digest in set(digests))
        if repeated > self.peer_bytes:
            raise BadRequestError(
                f"the request names adapters more than once, {repeated} bytes in all, the limit is {self.peer_bytes}: "
                "name each once, and the rows that use it",
            )

    def _make_room(self, size: int, limit: int, *, owner: str | None) -> None:
        """Drops the oldest adapters (of ``owner``, if given) until ``size`` bytes fit under ``limit``."""
        mine = [
            (digest, held)
            for digest, held in self._held.items()
            if held.owner is not None and owner in (None, held.owner)
        ]
        used = sum(held.num_bytes for _, held in mine)
        idle = [(digest, held) for digest, held in mine if not self._in_use[digest]]
        if used - sum(held.num_bytes for _, held in idle) + size > limit:
            raise CapacityError(
                f"no room for an adapter of {size} bytes: {used} of {limit} bytes are held and in use; "
                "try again when running requests have ended, or use another server"
            )
        for digest, held in idle:
            if used + size <= limit:
                return
            del self._held[digest]
            used -= held.num_bytes
