"""What a DHT node does for other peers: it keeps each peer's own records and answers look-ups, within bounds.

hivemind 1.1.12 keeps what anyone sends in anyone's name, and when there is no room drops what expires first: one sender
could erase all servers. Here a record comes from its owner, over the owner's authenticated connection, and stays until
it expires, or until its owner does not answer while somebody else wants the place. Nodes that join later learn it when
the owner announces itself again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2

from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.admission.addresses import Origin, crowd
from swarm_plugins.transport.admission.origins import Origins
from swarm_plugins.transport.admission.serializer import pack_dictionary
from swarm_plugins.transport.admission.storage import MAX_KEYS_PER_OWNER, BoundedStorage
from swarm_plugins.transport.records import OwnedRecordValidator

log = logging.getLogger(__name__)

MAX_KEYS_PER_CALL = 16
"""Keys in one call; this package looks up 4 at once and stores 2."""

MAX_ANSWER_BYTES = 3 << 18
"""Records in the answer to one look-up; the daemon carries 1 MiB."""

MAX_NODES = 4096
"""Nodes in the routing table, those that wait for a place included."""

_ASKED_AT_ONCE = 16
_ANSWER_S = 2.0
_PAUSE_S = 1.0


class Admission(OwnedRecordValidator):
    """Validates records, and knows where callers are. Marks the DHT nodes of this package: others are left as they are.

    Args:
        origins: From where peers call.
    """

    def __init__(self, origins: Origins) -> None:
        super().__init__()
        self.origins = origins
        self._asked_at = float("-inf")
        self._crowd_asked_at = float("-inf")
        self._nodes: dict[DHTID, Origin] = {}
        """Origins of the nodes in the routing table."""

    async def has_place(self, protocol: DHTProtocol, node_id: DHTID, peer_id: PeerID) -> bool:
        """Returns whether a peer may enter the routing table: one address, or one network, has so many places in it.

        If it may not, some of those who keep it out are asked whether they are still there, for the next time.
        """
        table = protocol.routing_table
        if node_id in table:
            return True
        origin = await self.origins.of(peer_id.to_base58())
        self._nodes = {node: its for node, its in self._nodes.items() if node in table}
        # Those asked last are at the end.
        rivals = crowd(self._nodes, origin) or (list(self._nodes) if len(self._nodes) >= MAX_NODES else [])
        if not rivals:
            self._nodes[node_id] = origin
            return True
        if time.monotonic() - self._crowd_asked_at >= _PAUSE_S:
            self._crowd_asked_at = time.monotonic()
            asked = rivals[:_ASKED_AT_ONCE]
            for node in asked:
                self._nodes[node] = self._nodes.pop(node)
            # hivemind drops those that do not answer.
            await asyncio.gather(*(_is_there(protocol, table[node].to_base58()) for node in asked))
        return False

    async def make_room(self, protocol: DHTProtocol, key: DHTID, origin: Origin) -> None:
        """Asks some of those who keep a newcomer out whether they are still there, and drops those who are not."""
        if time.monotonic() - self._asked_at < _PAUSE_S:
            return
        self._asked_at = time.monotonic()
        own = protocol.p2p.peer_id.to_base58()
        asked = [owner for owner in protocol.storage.rivals(key, origin) if owner != own][:_ASKED_AT_ONCE]
        answers = await asyncio.gather(*(_is_there(protocol, owner) for owner in asked))
        gone = [owner for owner, is_there in zip(asked, answers, strict=True) if not is_there]
        for owner in asked:
            protocol.storage.confirm(owner)
        if gone:
            log.info("forgot the records of %d peers that do not answer, as others want to announce theirs", len(gone))
            protocol.storage.drop(gone)


async def _is_there(protocol: DHTProtocol, owner: str) -> bool:
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await protocol.call_ping(PeerID.from_base58(owner), strict=False) is not None
    except TimeoutError:
        return False


async def store_own(self: Any, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
    """Replaces ``DHTProtocol.rpc_store``: stores the caller's own records."""
    if not isinstance(self.record_validator, Admission):
        return await _plain_store(self, request, context)
    owner = context.remote_id.to_base58()
    columns = (request.keys, request.subkeys, request.values, request.expiration_time)
    _check_count(len(request.keys), MAX_KEYS_PER_OWNER)
    if len({len(column) for column in columns}) > 1:
        raise ProtocolError(f"store call with columns of {[len(column) for column in columns]} items")
    if request.peer:
        await self.rpc_ping(dht_pb2.PingRequest(peer=request.peer), context)
    response = dht_pb2.StoreResponse(peer=self.node_info)
    for key, subkey, value, expiration in zip(*columns, strict=True):
        is_valid = subkey == msgspec.msgpack.encode(owner) and self._validate_record(key, subkey, value, expiration)
        response.store_ok.append(is_valid and await _admit(self, DHTID.from_bytes(key), owner, value, expiration))
    return response


async def _admit(protocol: DHTProtocol, key: DHTID, owner: str, value: bytes, expiration: float) -> bool:
    storage, admission = protocol.storage, protocol.record_validator
    if not isinstance(storage, BoundedStorage):
        return False  # this node is about to join
    origin = await admission.origins.of(owner)
    stored = storage.admit(key, owner, value, expiration, origin)
    if stored is None:
        await admission.make_room(protocol, key, origin)
        stored = storage.admit(key, owner, value, expiration, origin)
    return bool(stored)


async def find_few(self: Any, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
    """Replaces ``DHTProtocol.rpc_find``: looks up a bounded number of keys, and answers within a message."""
    if not isinstance(self.record_validator, Admission):
        return await _plain_find(self, request, context)
    keys = list(dict.fromkeys(request.keys))
    _check_count(len(request.keys), MAX_KEYS_PER_CALL)
    if len(keys) < len(request.keys):
        raise ProtocolError("look-up that names a key twice")
    if request.peer:
        await self.rpc_ping(dht_pb2.PingRequest(peer=request.peer), context)
    response = dht_pb2.FindResponse(peer=self.node_info)
    asker = DHTID.from_bytes(request.peer.node_id)
    for key in map(DHTID.from_bytes, keys):
        found = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        item = self.storage.get(key)
        if item is not None and isinstance(item.value, DictionaryDHTValue):
            found.type = dht_pb2.FOUND_DICTIONARY
            found.value = pack_dictionary(item.value, MAX_ANSWER_BYTES // len(keys))
            found.expiration_time = item.expiration_time
        for node, peer in self.routing_table.get_nearest_neighbors(key, k=self.bucket_size, exclude=asker):
            found.nearest_node_ids.append(node.to_bytes())
            found.nearest_peer_ids.append(peer.to_bytes())
        response.results.append(found)
    return response


async def send_own(self: Any, peer: Any, keys: Any, values: Sequence[Any], *args: Any, **options: Any) -> Any:
    """Replaces ``DHTProtocol.call_store``: sends no records of others, which nobody here would store."""
    if isinstance(self.record_validator, Admission) and any(isinstance(one, DictionaryDHTValue) for one in values):
        return [False] * len(values)
    return await _plain_send(self, peer, keys, values, *args, **options)


async def learn_node(self: Any, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
    """Replaces ``DHTProtocol.update_routing_table``: one node id for each peer, some peers for each address."""
    admission = self.record_validator
    if (
        isinstance(admission, Admission)
        and responded
        and node_id is not None
        and (node_id != node_id_of(peer_id) or not await admission.has_place(self, node_id, peer_id))
    ):
        return
    await _plain_learn(self, node_id, peer_id, responded)


def node_id_of(peer_id: PeerID) -> DHTID:
    """Returns the place of a peer in the DHT: it follows from the peer's key, so that it cannot choose one or many."""
    return DHTID.generate(source=peer_id.to_bytes())


def _check_count(num_keys: int, limit: int) -> None:
    if num_keys > limit:
        raise ProtocolError(f"call of the DHT with {num_keys} keys, the limit is {limit}")


_plain_store, _plain_find, _plain_send = DHTProtocol.rpc_store, DHTProtocol.rpc_find, DHTProtocol.call_store
_plain_learn = DHTProtocol.update_routing_table


def install_admission() -> None:
    """Replaces hivemind's answers to DHT calls in this process. Idempotent."""
    DHTProtocol.rpc_store = store_own
    DHTProtocol.rpc_find = find_few
    DHTProtocol.call_store = send_own
    DHTProtocol.update_routing_table = learn_node
