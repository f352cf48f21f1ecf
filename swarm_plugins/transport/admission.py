"""What a DHT node keeps and does for other peers: each peer's own records, a bounded number of them, at a bounded pace.

hivemind 1.1.12 keeps what anyone sends in anyone's name, and when there is no room drops what expires first: one sender
could erase all servers. Here a record comes from its owner, over the owner's authenticated connection, and stays until
it expires. Nodes that join later learn it when the owner announces itself again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.records import OwnedRecordValidator

MAX_SUBKEYS = 4096
"""Owners under one DHT key."""

MAX_KEYS = 4096
"""DHT keys that a node keeps for others."""

MAX_RECORDS = 20_000
"""Records of all keys; at 4 KiB each they take 80 MB."""

MAX_KEYS_PER_OWNER = 16
"""DHT keys under which one owner may have records; a server needs two."""

MAX_KEYS_PER_CALL = 64
"""Keys in one look-up; this package asks for 4."""

_BURST_CALLS = 100
_CALLS_PER_S = 10.0
_MAX_CALLERS = 4096
_DICTIONARY_CODE = 0x50

_MAX_SUBKEY_BYTES = 256

_value_decoder = msgspec.msgpack.Decoder(bytes | msgspec.msgpack.Ext)
_dictionary_decoder = msgspec.msgpack.Decoder(tuple[int | float | None, float, list[tuple[msgspec.Raw, bytes, float]]])


class Pace:
    """A budget of calls for each peer: a burst, then so many a second.

    Args:
        burst: Calls that may come at once.
        per_s: Calls a second after them.
        clock: Monotonic seconds; tests pass their own.
    """

    def __init__(self, burst: float, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._per_s = per_s
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, peer: str) -> bool:
        """Counts a call; returns whether the peer had one left."""
        now = self._clock()
        left, since = self._left.pop(peer, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._per_s)
        is_allowed = left >= 1
        self._left[peer] = (left - is_allowed, now)
        if len(self._left) > _MAX_CALLERS:
            self._left.popitem(last=False)
        return is_allowed


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]  # hivemind has no types
    """A DHT node's storage, with bounds on keys, records and keys per owner; what is in it stays until it expires."""

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
        owners = present.value if present is not None and isinstance(present.value, DictionaryDHTValue) else None
        if owners is None and len(self) >= MAX_KEYS:
            return False
        if (owners is None or subkey not in owners) and not self._has_room(subkey, owners):
            return False
        return cast(bool, super().store_subkey(key, subkey, value, expiration_time))

    def _has_room(self, subkey: Any, owners: DictionaryDHTValue | None) -> bool:
        if owners is not None and len(owners) >= MAX_SUBKEYS:
            return False
        records = keys_of_owner = 0
        for item in self.data.values():
            if isinstance(item.value, DictionaryDHTValue):
                records += len(item.value.data)
                keys_of_owner += subkey in item.value.data
        return records < MAX_RECORDS and keys_of_owner < MAX_KEYS_PER_OWNER


class TypedSerializer(MSGPackSerializer):  # type: ignore[misc]  # hivemind has no types
    """Decodes what a DHT of this package holds, and nothing else.

    hivemind builds whatever a peer sends: 4 MB of empty arrays take seconds.
    """

    @classmethod
    def loads(cls, buf: bytes) -> object:
        """Decodes bytes or a dictionary of records; raises ProtocolError for anything else."""
        try:
            value = _value_decoder.decode(buf)
        except msgspec.MsgspecError as exc:
            raise ProtocolError(f"value of the DHT that is neither bytes nor a dictionary: {exc}") from exc
        if not isinstance(value, msgspec.msgpack.Ext):
            return value
        if value.code != _DICTIONARY_CODE:
            raise ProtocolError(f"value of the DHT with extension type {value.code}, expected {_DICTIONARY_CODE}")
        return unpack_dictionary(bytes(value.data))


def unpack_dictionary(raw: bytes) -> DictionaryDHTValue:
    """Decodes a dictionary of records.

    Raises:
        ProtocolError: If it is malformed or too large.
    """
    try:
        _, _, items = _dictionary_decoder.decode(raw)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"malformed dictionary value: {exc}") from exc
    if len(items) > MAX_SUBKEYS:
        raise ProtocolError(f"dictionary value with {len(items)} items, the limit is {MAX_SUBKEYS}")
    with DictionaryDHTValue().freeze() as dictionary:
        for subkey, value, expiration_time in items:
            if len(subkey) > _MAX_SUBKEY_BYTES:
                raise ProtocolError(f"subkey of {len(subkey)} bytes, the limit is {_MAX_SUBKEY_BYTES}")
            dictionary.store(MSGPackSerializer.loads(bytes(subkey)), value, expiration_time)
        return cast(DictionaryDHTValue, dictionary)


class Admission(OwnedRecordValidator):
    """Validates records, and counts the calls of peers.

    A node whose validator this is answers within the bounds of this module; other nodes of the process as before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pace = Pace(_BURST_CALLS, _CALLS_PER_S)


async def store_own(self: Any, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
    """Replaces ``DHTProtocol.rpc_store``: stores the caller's own records."""
    if not isinstance(self.record_validator, Admission):
        return await _plain_store(self, request, context)
    owner = context.remote_id.to_base58()
    columns = (request.keys, request.subkeys, request.values, request.expiration_time)
    _check_call(self.record_validator, owner, len(request.keys), MAX_KEYS_PER_OWNER)
    if len({len(column) for column in columns}) > 1:
        raise ProtocolError(f"store call with columns of {[len(column) for column in columns]} items")
    if request.peer:
        await self.rpc_ping(dht_pb2.PingRequest(peer=request.peer), context)
    response = dht_pb2.StoreResponse(peer=self.node_info)
    for key, subkey, value, expiration in zip(*columns, strict=True):
        is_valid = subkey == msgspec.msgpack.encode(owner) and self._validate_record(key, subkey, value, expiration)
        stored = is_valid and self.storage.store_subkey(DHTID.from_bytes(key), owner, value, expiration)
        response.store_ok.append(stored)
    return response


async def find_few(self: Any, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
    """Replaces ``DHTProtocol.rpc_find``: looks up a bounded number of keys."""
    if isinstance(self.record_validator, Admission):
        _check_call(self.record_validator, context.remote_id.to_base58(), len(request.keys), MAX_KEYS_PER_CALL)
    return await _plain_find(self, request, context)


async def send_own(self: Any, peer: Any, keys: Any, values: Sequence[Any], *args: Any, **options: Any) -> Any:
    """Replaces ``DHTProtocol.call_store``: sends no records of others, which nobody here would store."""
    if isinstance(self.record_validator, Admission) and any(isinstance(one, DictionaryDHTValue) for one in values):
        return [False] * len(values)
    return await _plain_send(self, peer, keys, values, *args, **options)


async def learn_node(self: Any, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
    """Replaces ``DHTProtocol.update_routing_table``: one node id for each peer."""
    is_ours = isinstance(self.record_validator, Admission)
    if is_ours and responded and node_id is not None and node_id != node_id_of(peer_id):
        return
    await _plain_learn(self, node_id, peer_id, responded)


def node_id_of(peer_id: PeerID) -> DHTID:
    """Returns the place of a peer in the DHT: it follows from the peer's key, so that it cannot choose one or many."""
    return DHTID.generate(source=peer_id.to_bytes())


def _check_call(admission: Admission, peer: str, num_keys: int, limit: int) -> None:
    if num_keys > limit:
        raise ProtocolError(f"call of the DHT with {num_keys} keys, the limit is {limit}")
    if not admission.pace.take(peer):
        raise ProtocolError(f"more than {_CALLS_PER_S:g} calls of the DHT a second")


_plain_store, _plain_find, _plain_send = DHTProtocol.rpc_store, DHTProtocol.rpc_find, DHTProtocol.call_store
_plain_learn = DHTProtocol.update_routing_table


def install_admission() -> None:
    """Replaces hivemind's answers to DHT calls in this process. Idempotent."""
    DHTProtocol.rpc_store = store_own
    DHTProtocol.rpc_find = find_few
    DHTProtocol.call_store = send_own
    DHTProtocol.update_routing_table = learn_node
