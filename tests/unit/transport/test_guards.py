"""Attacks on hivemind's internals that succeed without the guards."""

from __future__ import annotations

import asyncio
import math
import time

import base58
import msgpack
import pytest
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P
from hivemind.utils import MSGPackSerializer
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import TimedStorage

from swarm_plugins.errors import ProtocolError
from swarm_plugins.transport.admission.serializer import MAX_SUBKEYS
from swarm_plugins.transport.guards import install_guards


@pytest.fixture(autouse=True)
def _guarded() -> None:
    install_guards()
    install_guards()


def soon() -> float:
    return time.time() + 100.0


def test_nested_extensions_are_refused_before_they_overflow_the_stack() -> None:
    # Without the guard: SIGSEGV of the whole process, by one request of 914 bytes from anyone.
    nested = msgpack.packb(0)
    for _ in range(300):
        nested = msgpack.packb(msgpack.ExtType(0x40, b"\x91" + nested))
    with pytest.raises(ValueError, match="nested deeper than 8"):
        MSGPackSerializer.loads(nested)


def test_honest_values_still_decode() -> None:
    value = (1, ("a", b"b"), [2.0, None], {"k": (3,)})
    assert MSGPackSerializer.loads(MSGPackSerializer.dumps(value)) == value
    dictionary = DictionaryDHTValue()
    dictionary.store("peer", b"value", soon())
    restored = MSGPackSerializer.loads(MSGPackSerializer.dumps(dictionary))
    assert dict(restored.items()) == dict(dictionary.items())
    assert restored.latest_expiration_time == dictionary.latest_expiration_time


@pytest.mark.parametrize("expiration", [math.nan, math.inf, "soon", None], ids=str)
def test_a_record_that_never_expires_is_refused(expiration: float) -> None:
    storage: TimedStorage[str, bytes] = TimedStorage(maxsize=2)
    assert not storage.store("forever", b"", expiration)
    for name in "abc":
        assert storage.store(name, b"", soon() + ord(name))
    assert len(storage) == 2


def test_an_older_record_offered_again_does_not_shorten_the_life_of_a_newer_one() -> None:
    storage: TimedStorage[str, bytes] = TimedStorage()
    assert storage.store("peer", b"new", soon())
    assert not storage.store("peer", b"old", time.time() + 0.02)
    time.sleep(0.05)
    assert storage.get("peer") is not None


def test_repeated_offers_do_not_grow_the_heap() -> None:
    storage: TimedStorage[str, bytes] = TimedStorage()
    start = soon()
    for step in range(5000):
        storage.store("peer", b"", start + step * 0.001)
    assert len(storage.expiration_heap) <= 70


def test_dictionary_values_do_not_choose_their_own_size_or_times() -> None:
    honest = [["peer", b"v", soon()]]
    hostile = msgpack.ExtType(0x50, msgpack.packb([10**9, math.inf, honest]))
    restored = MSGPackSerializer.loads(msgpack.packb(hostile))
    assert restored.maxsize == MAX_SUBKEYS
    assert restored.latest_expiration_time == honest[0][2]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param([None, 0.0, [["p", b"v", 1.0]] * 5000], id="too-many"),
        pytest.param([None, 0.0, [["p", "text", 1.0]]], id="value-type"),
        pytest.param([None, 0.0, [["p", b"v", "late"]]], id="time-type"),
        pytest.param([None, 0.0], id="short"),
        pytest.param({"a": 1}, id="no-list"),
    ],
)
def test_malformed_dictionary_values_are_refused(content: object) -> None:
    with pytest.raises(ProtocolError, match="dictionary value"):
        MSGPackSerializer.loads(msgpack.packb(msgpack.ExtType(0x50, msgpack.packb(content))))


async def test_a_declared_stream_length_is_bounded() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data((400 << 20).to_bytes(8, "big") + b"x")
    reader.feed_eof()
    with pytest.raises(ValueError, match="stream message of 419430400 bytes declared, the limit is 16777216"):
        await P2P.receive_raw_data(reader)
    reader = asyncio.StreamReader()
    reader.feed_data((3).to_bytes(8, "big") + b"abc")
    assert await P2P.receive_raw_data(reader) == b"abc"


@pytest.mark.parametrize(
    "peer", ["12D3KooWHLz3Rf22AevvgSVAb2EuQsCcmWzyWmWSv76CST7TrNk8", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"]
)
def test_addresses_with_peer_ids_are_written_as_the_daemon_reads_them(peer: str) -> None:
    # Without the change the daemon refuses to connect to any address that names its peer.
    address = Multiaddr(f"/ip4/127.0.0.1/tcp/1/p2p/{peer}/p2p-circuit")
    multihash = base58.b58decode(peer)
    assert address.to_bytes() == Multiaddr("/ip4/127.0.0.1/tcp/1").to_bytes() + (
        b"\xa5\x03" + bytes([len(multihash)]) + multihash + b"\xa2\x02"
    )
    assert str(Multiaddr(address.to_bytes())) == str(address)
