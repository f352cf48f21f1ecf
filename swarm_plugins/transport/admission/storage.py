"""The records that a DHT node keeps for others: bounded for each owner, address and network, and in all.

What is stored stays until it expires, or until its owner does not answer while somebody else wants the place.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue

from swarm_plugins.transport.admission import addresses
from swarm_plugins.transport.admission.addresses import UNKNOWN, Origin, crowd
from swarm_plugins.transport.admission.serializer import MAX_SUBKEYS

MAX_KEYS = 4096
"""DHT keys that a node keeps for others."""

MAX_RECORDS = 20_000
"""Records of all keys; at 4 KiB each they take 80 MB."""

MAX_KEYS_PER_OWNER = 16
"""DHT keys under which one owner may have records; a server needs two, and one for each other version of its blocks."""

_RECOUNT_S = 0.1


@dataclass
class _Census:
    """What is stored, counted; records that expire later are still counted."""

    keys_of: Counter[str] = field(default_factory=Counter)
    hosts: Counter[bytes] = field(default_factory=Counter)
    networks: Counter[bytes] = field(default_factory=Counter)
    records: int = 0
    counted_at: float = field(default_factory=time.monotonic)

    def add(self, owner: str, origin: Origin) -> None:
        if owner not in self.keys_of:
            self.hosts[origin.host] += 1
            self.networks[origin.network] += 1
        self.keys_of[owner] += 1
        self.records += 1


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]  # hivemind has no types
    """A DHT node's storage with bounds."""

    def __init__(self) -> None:
        super().__init__(maxsize=MAX_KEYS)
        self._origins: dict[str, Origin] = {}
        """Of the owners of records, those that were heard of last at the end."""
        self._census = _Census()

    def admit(self, key: Any, owner: str, value: bytes, expiration_time: float, origin: Origin) -> bool | None:
        """Stores another peer's record.

        Returns:
            Whether it was stored; None if there would be room for it without some other peers' records.
        """
        if owner not in self._owners(key):
            if self._refused(key, owner, origin):
                return False if self._census.keys_of[owner] >= MAX_KEYS_PER_OWNER else None
            self._census.add(owner, origin)
        if not super().store_subkey(key, owner, value, expiration_time):
            return False
        self._origins.setdefault(owner, origin)
        self.confirm(owner)
        return True

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Stores a record of this node's own, within the bounds; returns whether it did."""
        return bool(self.admit(key, subkey, value, expiration_time, UNKNOWN))

    def rivals(self, key: Any, origin: Origin) -> list[str]:
        """Returns the owners whose leaving makes room for a newcomer, those not heard of for longest first."""
        owners = self._owners(key)
        if len(owners) >= MAX_SUBKEYS:
            return [owner for owner in self._origins if owner in owners]
        return crowd(self._origins, origin) or list(self._origins)

    def confirm(self, owner: str) -> None:
        """Notes that an owner has been heard of."""
        if owner in self._origins:
            self._origins[owner] = self._origins.pop(owner)

    async def forget(self, owner: str) -> None:
        """Forgets all records of an owner; for other threads, which submit this to the DHT's."""
        self.drop([owner])

    def drop(self, owners: Iterable[str]) -> None:
        """Forgets all records of some owners."""
        for owner in owners:
            for key, item in list(self.data.items()):
                if isinstance(item.value, DictionaryDHTValue) and owner in item.value.data:
                    del item.value[owner]
                    if not item.value.data:
                        del self[key]
        self._recount()

    def _owners(self, key: Any) -> dict[str, Any]:
        present = self.get(key)
        if present is None or not isinstance(present.value, DictionaryDHTValue):
            return {}
        return cast("dict[str, Any]", present.value.data)

    def _refused(self, key: Any, owner: str, origin: Origin) -> bool:
        if not self._is_full_for(key, owner, origin):
            return False
        if time.monotonic() - self._census.counted_at < _RECOUNT_S:
            return True
        self._recount()
        return self._is_full_for(key, owner, origin)

    def _is_full_for(self, key: Any, owner: str, origin: Origin) -> bool:
        census, owners = self._census, self._owners(key)
        if len(owners) >= MAX_SUBKEYS or (not owners and len(self) >= MAX_KEYS) or census.records >= MAX_RECORDS:
            return True
        if owner in census.keys_of:
            return census.keys_of[owner] >= MAX_KEYS_PER_OWNER
        return (
            census.hosts[origin.host] >= addresses.MAX_PEERS_PER_HOST
            or census.networks[origin.network] >= addresses.MAX_PEERS_PER_NETWORK
        )

    def _recount(self) -> None:
        self._remove_outdated()
        self._census = _Census()
        for item in self.data.values():
            if isinstance(item.value, DictionaryDHTValue):
                item.value._remove_outdated()
                for owner in item.value.data:
                    self._census.add(owner, self._origins.get(owner, UNKNOWN))
        self._origins = {owner: its for owner, its in self._origins.items() if owner in self._census.keys_of}
