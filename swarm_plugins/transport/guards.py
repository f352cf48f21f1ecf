"""Hardens hivemind against malicious peers, and mends addresses.

hivemind 1.1.12 trusts the network more than an open swarm may. Each guard replaces an internal function with a checked
one; honest peers notice no difference. Drop a guard when a release of hivemind has the check: the attack tests
(tests/unit/transport/test_guards.py) then pass without it.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import math
from typing import Any

import base58
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P
from hivemind.utils import MSGPackSerializer
from hivemind.utils.multiaddr.codecs import cid
from hivemind.utils.timed_storage import HeapEntry, TimedStorage, ValueWithExpiration, get_dht_time

from swarm_plugins.transport.admission.calls import install_admission
from swarm_plugins.transport.admission.serializer import MAX_SUBKEYS, unpack_dictionary

MAX_NESTING = 8
"""Depth of nested extension types that hivemind's msgpack may decode; honest values need 2."""

MAX_STREAM_MESSAGE_BYTES = 16 << 20
"""Longest message on hivemind's own streams (ours have their own framing)."""

_depth: contextvars.ContextVar[int] = contextvars.ContextVar("msgpack_depth", default=0)
_plain_decode = MSGPackSerializer.__dict__["_decode_ext_types"].__func__
_plain_cid = cid.to_bytes


def install_guards() -> None:
    """Replaces hivemind's unchecked functions in this process. Idempotent."""
    MSGPackSerializer._decode_ext_types = classmethod(_decode_nested)
    TimedStorage.store = _store_finite
    DictionaryDHTValue.__init__ = _init_bounded
    DictionaryDHTValue.unpackb = staticmethod(unpack_dictionary)
    P2P.receive_raw_data = staticmethod(_receive_bounded)
    cid.to_bytes = _peer_id_bytes
    install_admission()


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


async def _receive_bounded(reader: asyncio.StreamReader) -> bytes:
    """Replaces ``P2P.receive_raw_data``, which reads as many bytes as the peer declares."""
    header = await reader.readexactly(P2P.HEADER_LEN)
    num_bytes = int.from_bytes(header, P2P.BYTEORDER)
    if num_bytes > MAX_STREAM_MESSAGE_BYTES:
        raise ValueError(f"stream message of {num_bytes} bytes declared, the limit is {MAX_STREAM_MESSAGE_BYTES}")
    return await reader.readexactly(num_bytes)


def _peer_id_bytes(protocol: Any, text: str) -> bytes:
    """Replaces the codec of ``/p2p/``: the daemon refuses the form in which hivemind writes peer ids (a CID)."""
    if protocol.name == "p2p" and text.startswith(("Qm", "1")):
        multihash = base58.b58decode(text)
        if not cid._is_binary_cidv0_multihash(multihash):
            raise ValueError(f"{text!r} is not a peer id")
        return multihash
    return bytes(_plain_cid(protocol, text))
