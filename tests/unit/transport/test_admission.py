"""What a DHT node keeps and does for others is bounded, and what it keeps is not pushed out."""

from __future__ import annotations

import time

import msgpack
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.utils import MSGPackSerializer

from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport import admission
from swarm_plugins.transport.admission import BoundedStorage, Pace, TypedSerializer
from swarm_plugins.transport.guards import install_guards


@pytest.fixture(autouse=True)
def _guarded() -> None:
    install_guards()


def soon() -> float:
    return time.time() + 100.0


def keys(count: int) -> list[DHTID]:
    return [DHTID.generate(source=f"key {index}") for index in range(count)]


def test_an_owner_cannot_stand_under_many_keys() -> None:
    storage = BoundedStorage.adopt(DHTLocalStorage())
    accepted = [storage.store(key, b"v", soon(), subkey="hog") for key in keys(20)]
    assert accepted == [True] * 16 + [False] * 4
    assert storage.store(keys(20)[19], b"v", soon(), subkey="other")
    assert storage.store(keys(1)[0], b"newer", soon() + 1, subkey="hog"), "a record may be renewed"


def test_storage_is_bounded_in_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_RECORDS", 5)
    storage = BoundedStorage.adopt(DHTLocalStorage())
    accepted = [storage.store(keys(1)[0], b"v", soon(), subkey=f"peer {index}") for index in range(8)]
    assert accepted == [True] * 5 + [False] * 3


def test_adopting_keeps_what_was_stored_before() -> None:
    early = DHTLocalStorage()
    early.store(keys(1)[0], b"v", soon(), subkey="peer")
    storage = BoundedStorage.adopt(early)
    assert storage.get(keys(1)[0]) is not None
    assert storage.maxsize == admission.MAX_KEYS


@pytest.mark.parametrize("bound", ["MAX_SUBKEYS", "MAX_RECORDS"])
def test_newcomers_that_live_longer_push_nobody_out(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, bound, 3)
    storage = BoundedStorage.adopt(DHTLocalStorage())
    (key,) = keys(1)
    for name in "abc":
        assert storage.store(key, b"honest", soon(), subkey=name)
    for index in range(100):
        assert not storage.store(key, b"sybil", soon() + 3000, subkey=f"sybil {index}")
    assert sorted(storage.get(key).value.data) == ["a", "b", "c"]
    assert storage.store(key, b"renewed", soon() + 1, subkey="a")


def test_newcomers_push_no_key_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_KEYS", 2)
    storage = BoundedStorage.adopt(DHTLocalStorage())
    accepted = [storage.store(key, b"v", soon() + index, subkey=f"peer {index}") for index, key in enumerate(keys(4))]
    assert accepted == [True, True, False, False]


def test_a_place_is_free_again_when_its_record_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_SUBKEYS", 1)
    storage = BoundedStorage.adopt(DHTLocalStorage())
    (key,) = keys(1)
    assert storage.store(key, b"v", time.time() + 0.1, subkey="a")
    assert not storage.store(key, b"v", soon(), subkey="b")
    time.sleep(0.15)
    assert storage.store(key, b"v", soon(), subkey="b")


def test_a_peer_has_a_burst_of_calls_then_so_many_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    pace = Pace(burst=3, per_s=2.0, clock=lambda: now)
    assert [pace.take("a") for _ in range(4)] == [True, True, True, False]
    assert pace.take("b")
    now = 1.0
    assert [pace.take("a") for _ in range(3)] == [True, True, False]
    now = 1e9
    assert [pace.take("a") for _ in range(4)] == [True, True, True, False]
    monkeypatch.setattr(admission, "_MAX_CALLERS", 10)
    for index in range(100):
        pace.take(f"peer {index}")
    assert len(pace._left) <= 12


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
