"""Decodes values of the DHT by type, and packs no more of them than fits into an answer."""

from __future__ import annotations

import random
from typing import cast

import msgspec
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import MSGPackSerializer

from swarm_plugins.errors import ProtocolError

MAX_SUBKEYS = 4096
"""Owners under one DHT key."""

_DICTIONARY_CODE = 0x50
_MAX_SUBKEY_BYTES = 256
_ITEM_BYTES = 100
"""What a record takes in a packed dictionary besides its value."""

_value_decoder = msgspec.msgpack.Decoder(bytes | msgspec.msgpack.Ext)
_dictionary_decoder = msgspec.msgpack.Decoder(tuple[int | float | None, float, list[tuple[msgspec.Raw, bytes, float]]])


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


def pack_dictionary(dictionary: DictionaryDHTValue, max_bytes: int) -> bytes:
    """Encodes a dictionary; if it is too large, a random part of it, so that large records hide no others for long."""
    items = list(dictionary.items())
    if sum(len(item.value) + _ITEM_BYTES for _, item in items) <= max_bytes:
        return cast(bytes, MSGPackSerializer.dumps(dictionary))
    random.shuffle(items)
    with DictionaryDHTValue().freeze() as part:
        for subkey, item in items:
            max_bytes -= len(item.value) + _ITEM_BYTES
            if max_bytes < 0:
                break
            part.store(subkey, item.value, item.expiration_time)
        return cast(bytes, MSGPackSerializer.dumps(part))
