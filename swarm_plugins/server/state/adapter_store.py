"""Adapters that a server holds, by digest, under a byte budget."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.errors import CapacityError, ConfigError
from swarm_plugins.ledger import Groups
from swarm_plugins.server.failures import BadRequestError, RequestError
from swarm_plugins.server.state.shares import Shares

MAX_ADAPTERS = 256
"""Most adapters in one request."""

OBJECT_BYTES = 2048
"""Bytes that an adapter, each of its layers and each of its tensors count for, besides the tensors' values: as Python
objects a layer takes up to 1.5 KiB, a tensor 0.5 KiB. Layers may share tensors, and tensors may be empty."""
_MOST_IN_USE = 3
"""Quarters of the budget that newcomers of one address may have in use: a quarter stays for others."""

_Key = tuple[str | None, str]
"""Who has uploaded an adapter (None: the host publishes it), and its digest."""


@dataclass(frozen=True)
class _Held:
    adapter: LoadedAdapter
    num_bytes: int


class AdapterStore:
    """Holds adapters; those in use or published stay, of the others those go first that `Shares` names.

    A digest finds an adapter only for the peer that has uploaded it: another that knows or guesses the digest can
    neither compute with it nor learn that it is here. Used from the event loop only.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        groups: Groups | None = None,
        peer_bytes: int | None = None,
        object_bytes: int = OBJECT_BYTES,
    ) -> None:
        if budget_bytes < 0:
            raise ConfigError(f"the adapter budget must be 0 or more bytes, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.peer_bytes = budget_bytes // 2 if peer_bytes is None else peer_bytes
        self.object_bytes = object_bytes
        self._held: dict[_Key, _Held] = {}
        self._in_use: Counter[_Key] = Counter()
        self._shares: Shares[_Key] = Shares(groups)

    @property
    def used_bytes(self) -> int:
        """Bytes of all uploaded adapters; published ones are the host's own."""
        return self._shares.num_bytes

    def size_of(self, adapter: LoadedAdapter) -> int:
        """Returns the bytes that an adapter counts for."""
        num_objects = 1 + len(adapter.spec.layers) + len(adapter.tensors)
        return adapter.num_bytes + self.object_bytes * num_objects

    def publish(self, adapter: LoadedAdapter) -> None:
        """Holds the host's own adapter until it is withdrawn, outside the budget."""
        self._held[None, adapter.digest] = _Held(adapter, adapter.num_bytes)

    @property
    def published(self) -> tuple[str, ...]:
        """Digests of the host's own adapters."""
        return tuple(digest for peer, digest in self._held if peer is None)

    def withdraw_all_but(self, digests: Collection[str]) -> None:
        """Drops the host's own adapters, except these and those in use."""
        for key in list(self._held):
            if key[0] is None and key[1] not in digests and not self._in_use[key]:
                del self._held[key]

    def put(self, peer: str, adapter: LoadedAdapter) -> None:
        """Holds an adapter that ``peer`` has uploaded.

        Raises:
            CapacityError: If it does not fit with the adapters in use, or is larger than one peer's share.
        """
        key, shares = (peer, adapter.digest), self._shares
        if key in self._held:
            shares.touch(key)
            return
        if (None, adapter.digest) in self._held:
            return  # the host's own copy serves this client as well
        size = self.size_of(adapter)
        if size > self.peer_bytes:
            raise CapacityError(
                f"the adapter takes {size} bytes, one client may hold {self.peer_bytes} on this server: "
                "lower its rank or adapt fewer modules, or use a server that allows more"
            )
        while shares.held(peer) + size > self.peer_bytes:
            self._drop(shares.first_of(peer), size)
        if shares.in_use(peer) + size > max(self.peer_bytes, self.budget_bytes * _MOST_IN_USE // 4):
            self._drop(None, size)
        while shares.num_bytes + size > self.budget_bytes:
            self._drop(shares.first(peer, size), size)
        self._held[key] = _Held(adapter, size)
        shares.add(key, peer, size)

    def clear(self) -> None:
        """Drops all uploaded adapters that are not in use."""
        while (first := self._shares.first()) is not None:
            self._drop(first, 0)

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

    def _begin_use(self, key: _Key) -> None:
        self._in_use[key] += 1
        if self._in_use[key] == 1 and key in self._shares:
            self._shares.hold(key)

    def _end_use(self, key: _Key) -> None:
        self._in_use[key] -= 1
        if not self._in_use[key]:
            del self._in_use[key]
            if key in self._shares:
                self._shares.let_go(key)

    def _drop(self, key: _Key | None, size: int) -> None:
        """Drops an adapter, so that another of ``size`` bytes finds room; none is left if ``key`` is None."""
        if key is None:
            raise CapacityError(
                f"no room for an adapter of {size} bytes: {self.used_bytes} of {self.budget_bytes} bytes are held and "
                "in use; try again when running requests have ended, or use another server"
            )
        self._shares.remove(key)
        del self._held[key]
