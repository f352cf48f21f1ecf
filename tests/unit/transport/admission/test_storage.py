"""What a DHT node keeps is bounded, and what it keeps is not pushed out."""

from __future__ import annotations

import time

import pytest
from hivemind.dht.routing import DHTID
from hivemind.utils import timed_storage

from swarm_plugins.transport.admission import storage as storage_module
from swarm_plugins.transport.admission.addresses import Origin
from swarm_plugins.transport.admission.storage import BoundedStorage
from swarm_plugins.transport.guards import install_guards


@pytest.fixture(autouse=True)
def _guarded() -> None:
    install_guards()


def soon() -> float:
    return time.time() + 100.0


def keys(count: int) -> list[DHTID]:
    return [DHTID.generate(source=f"key {index}") for index in range(count)]


def test_an_owner_cannot_stand_under_many_keys() -> None:
    storage = BoundedStorage()
    accepted = [storage.store(key, b"v", soon(), subkey="hog") for key in keys(20)]
    assert accepted == [True] * 16 + [False] * 4
    assert storage.store(keys(20)[19], b"v", soon(), subkey="other")
    assert storage.store(keys(1)[0], b"newer", soon() + 1, subkey="hog"), "a record may be renewed"


def test_storage_is_bounded_in_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "MAX_RECORDS", 5)
    storage = BoundedStorage()
    accepted = [storage.store(keys(1)[0], b"v", soon(), subkey=f"peer {index}") for index in range(8)]
    assert accepted == [True] * 5 + [False] * 3


@pytest.mark.parametrize("bound", ["MAX_SUBKEYS", "MAX_RECORDS"])
def test_newcomers_that_live_longer_push_nobody_out(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, bound, 3)
    storage = BoundedStorage()
    (key,) = keys(1)
    for name in "abc":
        assert storage.store(key, b"honest", soon(), subkey=name)
    for index in range(100):
        assert not storage.store(key, b"sybil", soon() + 3000, subkey=f"sybil {index}")
    assert sorted(storage.get(key).value.data) == ["a", "b", "c"]
    assert storage.store(key, b"renewed", soon() + 1, subkey="a")


def test_newcomers_push_no_key_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "MAX_KEYS", 2)
    storage = BoundedStorage()
    accepted = [storage.store(key, b"v", soon() + index, subkey=f"peer {index}") for index, key in enumerate(keys(4))]
    assert accepted == [True, True, False, False]


def test_a_place_is_free_again_when_its_record_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "MAX_SUBKEYS", 1)
    storage = BoundedStorage()
    (key,) = keys(1)
    assert storage.store(key, b"v", time.time() + 50.0, subkey="a")
    assert not storage.store(key, b"v", soon(), subkey="b")
    monkeypatch.setattr(timed_storage, "get_dht_time", lambda: time.time() + 51.0)
    assert storage.store(key, b"v", soon(), subkey="b")


def origin(*numbers: int) -> Origin:
    return Origin(bytes(numbers), bytes(numbers[:3]))


def test_4200_identities_of_one_address_leave_room_for_others() -> None:
    storage = BoundedStorage()
    (key,) = keys(1)
    assert storage.admit(key, "honest", b"v", soon(), origin(1, 1, 1, 1))
    stored = [storage.admit(key, f"sybil {index}", b"v", soon() + 3000, origin(2, 2, 2, 2)) for index in range(4200)]
    assert stored.count(True) == 64
    assert set(stored[64:]) == {None}, "there would be room without the others"
    assert storage.admit(key, "honest too", b"v", soon(), origin(2, 2, 2, 3))
    assert storage.admit(key, "honest", b"v2", soon() + 1, origin(1, 1, 1, 1))
    for index in range(4200):
        storage.admit(key, f"neighbor {index}", b"v", soon() + 3000, origin(2, 2, 2, index % 250))
    assert len(storage.get(key).value.data) == 1 + 256
    assert storage.admit(key, "honest three", b"v", soon(), origin(3, 2, 2, 3))


def test_those_not_heard_of_for_longest_are_asked_first_and_leave_their_place() -> None:
    storage = BoundedStorage()
    first, second = keys(2)
    here = origin(2, 2, 2, 2)
    for index in range(64):
        assert storage.admit(first, f"peer {index}", b"v", soon(), here)
    assert storage.admit(second, "elsewhere", b"v", soon(), origin(9, 9, 9, 9))
    assert storage.admit(second, "peer 0", b"v", soon(), here)
    rivals = storage.rivals(first, here)
    assert rivals == [*(f"peer {index}" for index in range(1, 64)), "peer 0"]
    assert storage.admit(first, "newcomer", b"v", soon(), here) is None
    storage.drop(rivals[:2])
    assert storage.admit(first, "newcomer", b"v", soon(), here)
    assert "peer 1" not in storage.get(first).value.data
    storage.drop(["peer 0", "elsewhere"])
    assert storage.get(second) is None
