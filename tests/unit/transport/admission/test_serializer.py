"""Values of the DHT decode by type, and answers fit into a message."""

from __future__ import annotations

import time

import msgpack
import pytest
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import MSGPackSerializer

from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.admission.serializer import TypedSerializer, pack_dictionary
from swarm_plugins.transport.guards import install_guards


@pytest.fixture(autouse=True)
def _guarded() -> None:
    install_guards()


def soon() -> float:
    return time.time() + 100.0


def test_bytes_and_dictionaries_of_records_decode() -> None:
    dictionary = DictionaryDHTValue()
    dictionary.store("peer", b"value", soon())
    restored = TypedSerializer.loads(TypedSerializer.dumps(dictionary))
    assert isinstance(restored, DictionaryDHTValue)
    assert dict(restored.items()) == dict(dictionary.items())
    assert TypedSerializer.loads(TypedSerializer.dumps(b"value")) == b"value"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(msgpack.packb([[]] * 1_000_000), id="empty-arrays"),
        pytest.param(msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([[]] * 1_000_000))), id="in-a-dictionary"),
        pytest.param(
            msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([1, 1.0, [[[[]] * 1_000_000, b"", 1.0]]]))),
            id="as-subkey",
        ),
        pytest.param(msgpack.packb(msgpack.ExtType(0x40, b"\x91\x01")), id="tuple"),
        pytest.param(b"\xc1", id="not-msgpack"),
    ],
)
def test_other_values_are_refused_before_they_are_built(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MSGPackSerializer, "loads", lambda _: pytest.fail("decoded by hivemind"))
    with pytest.raises(ProtocolError):
        TypedSerializer.loads(content)


def test_large_records_hide_no_others_for_long() -> None:
    # 1,000 records of 4 KiB would not fit into an answer: the whole key could not be looked up any more.
    dictionary = DictionaryDHTValue()
    for index in range(1000):
        dictionary.store(f"peer {index}", bytes(4096), soon())
    seen: set[str] = set()
    for _ in range(30):
        packed = pack_dictionary(dictionary, 1 << 20)
        assert len(packed) <= 1 << 20
        part = TypedSerializer.loads(packed)
        assert isinstance(part, DictionaryDHTValue)
        seen.update(part.data)
    assert len(seen) > 990
