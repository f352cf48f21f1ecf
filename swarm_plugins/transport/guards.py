"""Hardens hivemind against malicious peers.

hivemind 1.1.12 trusts the network more than an open swarm may. Each guard replaces an internal function with a checked
one; honest peers notice no difference. Drop a guard when a release of hivemind has the check: the attack tests
(tests/unit/transport/test_guards.py) then pass without it.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import math
from typing import Any, cast

from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import P2P
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import HeapEntry, TimedStorage, ValueWithExpiration, get_dht_time

MAX_NESTING = 8
"""Depth of nested extension types that hivemind's msgpack may decode; honest values need 2."""

MAX_STREAM_MESSAGE_BYTES = 16 << 20
"""Longest message on hivemind's own streams (ours have their own framing)."""

MAX_SUBKEYS = 4096
"""Owners under one DHT key."""

MAX_KEYS = 4096
"""DHT keys that a node keeps for others."""

MAX_RECORDS = 20_000
"""Records of all keys; at 4 KiB each they take 80 MB."""

MAX_KEYS_PER_OWNER = 16
"""DHT keys under which one owner may have records; a server needs two."""

_depth: contextvars.ContextVar[int] = contextvars.ContextVar("msgpack_depth", default=0)
_plain_decode = MSGPackSerializer.__dict__["_decode_ext_types"].__func__


def install_guards() -> None:
    """Replaces hivemind's unchecked functions in this process. Idempotent."""
    MSGPackSerializer._decode_ext_types = classmethod(_decode_nested)
    TimedStorage.store = _store_finite
    DictionaryDHTValue.__init__ = _init_bounded
    DictionaryDHTValue.unpackb = classmethod(_unpack_dictionary)
    P2P.receive_raw_data = staticmethod(_receive_bounded)


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]  # hivemind has no types
    """A DHT node's storage, with bounds on keys, records and keys per owner."""

    @classmethod
    def adopt(cls, storage: DHTLocalStorage) -> BoundedStorage:
        """Returns a bounded storage that takes over another's records."""
        bounded = cls(maxsize=MAX_KEYS)
        bounded.data, bounded.key_to_heap = storage.data, storage.key_to_heap
        bounded.expiration_heap = storage.expiration_heap
        return bounded

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Stores a record unless the owner has a later one or a bound is reached; returns whether it did."""
        present = self.get(key)
        is_new = present is None or not isinstance(present.value, DictionaryDHTValue) or subkey not in present.value
        if is_new and not self._has_room(subkey):
            return False
        return cast(bool, super().store_subkey(key, subkey, value, expiration_time))

    def _has_room(self, subkey: Any) -> bool:
        records = keys_of_owner = 0
        for item in self.data.values():
            if isinstance(item.value, DictionaryDHTValue):
                records += len(item.value.data)
                keys_of_owner += subkey in item.value.data
        return records < MAX_RECORDS and keys_of_owner < MAX_KEYS_PER_OWNER


def _decode_nested(cls: type[MSGPackSerializer], type_code: int, data: bytes) -> Any:
    # Each nested extension is a nested call of the C decoder: 200 levels in 914 bytes overflow the stack.
    depth = _depth.get()
    if depth >= MAX_NESTING:
        raise ValueError(f"msgpack extensions nested deeper than {MAX_NESTING}")
    token = _depth.set(depth + 1)
    try:
        return _plain_decode(cls, type_code, data)
    finally:
        _depth.reset(token)


def _store_finite(self: Any, key: Any, value: Any, expiration_time: float) -> bool:
    """Replaces ``TimedStorage.store``.

    Upstream accepts a NaN time, which stops all eviction, drops a record early when an older one is offered again, and
    grows its heap with every refused offer.
    """
    if not isinstance(expiration_time, int | float) or not math.isfinite(expiration_time):
        return False
    if expiration_time < get_dht_time() and not self.frozen:
        return False
    present = self.data.get(key)
    if present is not None and present.expiration_time >= expiration_time:
        return False
    self.key_to_heap[key] = HeapEntry(expiration_time, key)
    heapq.heappush(self.expiration_heap, self.key_to_heap[key])
    self.data[key] = ValueWithExpiration(value, expiration_time)
    if len(self.expiration_heap) > 2 * len(self.data) + 64:
        self.expiration_heap[:] = self.key_to_heap.values()
        heapq.heapify(self.expiration_heap)
    self._remove_outdated()
    return True


def _init_bounded(self: Any, maxsize: int | None = None) -> None:
    """Replaces ``DictionaryDHTValue.__init__``: peers cannot choose how large a value grows."""
    TimedStorage.__init__(self, MAX_SUBKEYS)


def _unpack_dictionary(cls: type[DictionaryDHTValue], raw: bytes) -> DictionaryDHTValue:
    """Replaces ``DictionaryDHTValue.unpackb``; checks sizes and times."""
    unpacked = MSGPackSerializer.loads(raw)
    if not isinstance(unpacked, list) or len(unpacked) != 3 or not isinstance(unpacked[2], list):
        raise ValueError("malformed dictionary value")
    items = unpacked[2]
    if len(items) > MAX_SUBKEYS:
        raise ValueError(f"dictionary value with {len(items)} items, the limit is {MAX_SUBKEYS}")
    with cls().freeze() as dictionary:
        for subkey, value, expiration_time in items:
            if not isinstance(value, bytes) or not isinstance(expiration_time, float):
                raise ValueError("malformed item of a dictionary value")
            dictionary.store(subkey, value, expiration_time)
        return dictionary


async def _receive_bounded(reader: asyncio.StreamReader) -> bytes:
    """Replaces ``P2P.receive_raw_data``, which reads as many bytes as the peer declares."""
    header = await reader.readexactly(P2P.HEADER_LEN)
    num_bytes = int.from_bytes(header, P2P.BYTEORDER)
    if num_bytes > MAX_STREAM_MESSAGE_BYTES:
        raise ValueError(f"stream message of {num_bytes} bytes declared, the limit is {MAX_STREAM_MESSAGE_BYTES}")
    return await reader.readexactly(num_bytes)
