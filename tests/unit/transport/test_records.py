"""DHT records: only their owner can write them, they expire, and only under their own key."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path

import msgspec
import pytest
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer

from swarm_plugins.errors import ConfigError, ProtocolError
from swarm_plugins.transport.identity import (
    Identity,
    create_identity_file,
    load_identity,
)
from swarm_plugins.transport.records import (
    MAX_ROUND_TRIPS,
    GoneRecord,
    ModelInfo,
    ModelRecord,
    OwnedRecordValidator,
    Record,
    ServerRecord,
    check_server_info,
    key_id,
    majority,
    open_record,
    own_model_key,
    own_server_key,
    possible_round_trips,
    server_keys,
    sign_record,
)
from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.transport.wire import decode, encode

INFO = ServerInfo(version="v1", model="m", num_blocks=8, start=0, end=4, dtype="float32", quantization="none")


def identity_at(path: Path) -> Identity:
    create_identity_file(path)
    return load_identity(path)


@pytest.fixture
def owner(tmp_path: Path) -> Identity:
    return identity_at(tmp_path / "owner")


@pytest.fixture
def stranger(tmp_path: Path) -> Identity:
    return identity_at(tmp_path / "stranger")


def soon() -> float:
    return time.time() + 60.0


def signed(signer: Identity, key: str, expiration: float) -> bytes:
    return sign_record(signer, key, ServerRecord(info=INFO), expiration)


@pytest.mark.parametrize(
    "record",
    [ServerRecord(info=INFO), GoneRecord(version="v1"), ModelRecord(version="v1", model="m", num_blocks=8)],
    ids=lambda record: type(record).__name__,
)
def test_a_record_of_its_owner_is_believed(owner: Identity, record: Record) -> None:
    key = own_model_key(owner.peer_id) if isinstance(record, ModelRecord) else own_server_key("v1", owner.peer_id)
    expiration = soon()
    blob = sign_record(owner, key, record, expiration)
    assert open_record(key_id(key), owner.peer_id, blob, expiration) == record


def test_a_record_under_a_strangers_name_is_refused(owner: Identity, stranger: Identity) -> None:
    expiration = soon()
    key = own_server_key("v1", owner.peer_id)
    blob = signed(stranger, key, expiration)
    with pytest.raises(ProtocolError, match=f"record under {owner.peer_id} comes with the key of {stranger.peer_id}"):
        open_record(key_id(key), owner.peer_id, blob, expiration)


def test_a_strangers_signature_with_the_owners_key_is_refused(owner: Identity, stranger: Identity) -> None:
    expiration = soon()
    key = own_server_key("v1", owner.peer_id)
    forger = dataclasses.replace(owner, private_key=stranger.private_key)
    blob = signed(forger, key, expiration)
    with pytest.raises(ProtocolError, match="wrong signature"):
        open_record(key_id(key), owner.peer_id, blob, expiration)


def test_a_record_cannot_be_given_a_longer_life(owner: Identity) -> None:
    expiration = soon()
    key = own_server_key("v1", owner.peer_id)
    blob = signed(owner, key, expiration)
    with pytest.raises(ProtocolError, match="wrong signature"):
        open_record(key_id(key), owner.peer_id, blob, expiration + 1)


def test_a_record_of_another_version_does_not_fit_the_key(owner: Identity) -> None:
    expiration = soon()
    key = own_server_key("v2", owner.peer_id)
    blob = signed(owner, key, expiration)
    with pytest.raises(ProtocolError, match="under a wrong key"):
        open_record(key_id(key), owner.peer_id, blob, expiration)


def test_a_server_stands_in_one_shard_only(owner: Identity) -> None:
    expiration = soon()
    for key in server_keys("v1"):
        blob = signed(owner, key, expiration)
        if key == own_server_key("v1", owner.peer_id):
            open_record(key_id(key), owner.peer_id, blob, expiration)
        else:
            with pytest.raises(ProtocolError, match="under a wrong key"):
                open_record(key_id(key), owner.peer_id, blob, expiration)


@pytest.mark.parametrize("ttl_s", [math.nan, math.inf, -math.inf, 4000.0, -1000.0], ids=str)
def test_a_record_lives_an_hour_at_most(owner: Identity, ttl_s: float) -> None:
    expiration = time.time() + ttl_s
    key = own_server_key("v1", owner.peer_id)
    blob = signed(owner, key, expiration)
    with pytest.raises(ProtocolError, match="the limit is 3600 s from now"):
        open_record(key_id(key), owner.peer_id, blob, expiration)


def test_a_record_has_four_kibibytes_at_most(owner: Identity) -> None:
    expiration = soon()
    key = own_server_key("v1", owner.peer_id)
    large = msgspec.structs.replace(INFO, adapters=tuple(f"someone/adapter-{i}" for i in range(400)))
    with pytest.raises(ConfigError, match="the limit is 4096: announce fewer adapters"):
        sign_record(owner, key, ServerRecord(info=large), expiration)
    with pytest.raises(ProtocolError, match="record has 4097 bytes, the limit is 4096"):
        open_record(key_id(key), owner.peer_id, bytes(4097), expiration)


def test_what_a_later_version_says_of_its_servers_is_ignored(owner: Identity) -> None:
    class LaterInfo(ServerInfo, frozen=True, kw_only=True, tag="ServerInfo"):
        novelty: int = 1

    later = LaterInfo(**{**msgspec.structs.asdict(INFO)})
    expiration = soon()
    key = own_server_key("v1", owner.peer_id)
    blob = sign_record(owner, key, ServerRecord(info=later), expiration)
    assert b"novelty" in blob
    assert open_record(key_id(key), owner.peer_id, blob, expiration) == ServerRecord(info=INFO)
    assert decode(b"".join(encode(later))) == INFO  # type: ignore[arg-type]


def test_round_trips_are_left_out_where_they_do_not_fit(owner: Identity) -> None:
    expiration = soon()
    key = own_server_key("v1", owner.peer_id)
    far = tuple((f"12D3KooW{number:044}", 0.1234) for number in range(MAX_ROUND_TRIPS))
    for num_adapters, kept in ((100, far), (150, ())):
        names = tuple(f"someone/adapter-{i}" for i in range(num_adapters))
        record = ServerRecord(info=msgspec.structs.replace(INFO, adapters=names, round_trips=far))
        found = open_record(key_id(key), owner.peer_id, sign_record(owner, key, record, expiration), expiration)
        assert isinstance(found, ServerRecord)
        assert (found.info.adapters, found.info.round_trips) == (names, kept)


@pytest.mark.parametrize(
    ("claimed", "believed"),
    [
        pytest.param((("a", 0.1), ("b", 60.0)), {"a": 0.1, "b": 60.0}, id="possible"),
        pytest.param((("a", math.nan), ("b", math.inf), ("c", -0.1), ("d", 61.0), ("e", 0.0)), {"e": 0.0}, id="not"),
        pytest.param((("a" * 513, 0.1),), {}, id="name"),
        pytest.param(tuple((str(i), 0.1) for i in range(17)), {}, id="too-many"),
    ],
)
def test_impossible_round_trips_are_ignored_and_their_server_is_not(
    claimed: tuple[tuple[str, float], ...], believed: dict[str, float]
) -> None:
    info = msgspec.structs.replace(INFO, round_trips=claimed)
    check_server_info(info)
    assert possible_round_trips(info) == believed


def test_a_server_of_an_earlier_version_names_no_cost_of_rows() -> None:
    said = msgspec.to_builtins(msgspec.structs.replace(INFO, kv_row_tokens=7))
    assert msgspec.convert(said, ServerInfo).kv_row_tokens == 7
    del said["kv_row_tokens"]
    known = msgspec.convert(said, ServerInfo)
    check_server_info(known)
    assert known.kv_row_tokens == 0


@pytest.mark.parametrize("blob", [b"", b"\xff", b"\x93\xc4\x00\xc4\x00\xc4\x00", b"\x91" * 4000], ids=repr)
def test_garbage_is_refused(owner: Identity, blob: bytes) -> None:
    with pytest.raises(ProtocolError):
        open_record(key_id(own_server_key("v1", owner.peer_id)), owner.peer_id, blob, soon())


@pytest.mark.parametrize(
    "change",
    [
        {"start": 4},
        {"end": 9},
        {"start": -1},
        {"num_blocks": 10**6, "end": 10**6},
        {"throughput": math.nan},
        {"throughput": 1e-320},
        {"network_tokens_s": -1.0},
        {"network_tokens_s": math.inf},
        {"target": (4, 4)},
        {"target": (-1, 4)},
        {"leaving": (0, 1 << 40)},
        {"decode_s": -1.0},
        {"load": math.inf},
        {"free_kv_tokens": -1},
        {"kv_token_bytes": -1},
        {"kv_row_bytes": 1 << 60},
        {"kv_row_tokens": -1},
        {"kv_row_tokens": 1 << 53},
        {"max_batch_tokens": 2**60},
        {"version": ""},
        {"model": "m" * 600},
        {"model": "\x1b[2J"},
        {"dtype": "float32\nERROR all is lost"},
        {"adapters": ("a\x07",)},
        {"adapters": ("a",) * 1025},
        {"adapter_digests": ("a",) * 1025},
        {"adapter_digests": ("a" * 513,)},
        {"experts": (2, 2)},
        {"experts": (-1, 2)},
        {"experts": (0, 2**40)},
        {"slice": (0, 2)},
        {"experts": (0, 2), "slice": (2, 2)},
        {"experts": (0, 2), "slice": (0, 2**20)},
        {"experts": (0, 2), "needs": ((0, 1, 0, 2),)},
        {"needs": ((0, 1, 0, 2),) * 65},
        {"needs": ((0, 9, 0, 2),)},
        {"needs": ((0, 1, 2, 2),)},
        {"also": (("v2", 2, 5),)},
        {"also": (("v2", 2, 2),)},
        {"also": (("v1", 0, 2),)},
        {"also": (("v2", 0, 2), ("v2", 2, 4))},
        {"also": (("", 0, 2),)},
        {"also": (("v2\n", 0, 2),)},
        {"also": tuple((f"v{number}", 0, 2) for number in range(2, 7))},
    ],
    ids=str,
)
def test_impossible_claims_of_a_server_are_refused(owner: Identity, change: dict[str, object]) -> None:
    claimed = msgspec.structs.replace(INFO, **change)
    with pytest.raises(ProtocolError, match="claims"):
        check_server_info(claimed)
    expiration = soon()
    key = own_server_key(claimed.version, owner.peer_id)
    blob = sign_record(owner, key, ServerRecord(info=claimed), expiration)
    with pytest.raises(ProtocolError):
        open_record(key_id(key), owner.peer_id, blob, expiration)


def test_a_throughput_near_zero_is_named() -> None:
    check_server_info(msgspec.structs.replace(INFO, throughput=0.0))
    with pytest.raises(ProtocolError, match=r"a throughput of 1e-07 tokens/s, expected 1e-06 or more, or 0 for one"):
        check_server_info(msgspec.structs.replace(INFO, throughput=1e-7))


def test_the_dht_stores_nothing_but_our_records(owner: Identity) -> None:
    validator = OwnedRecordValidator()
    expiration = soon()
    key = own_server_key("v1", owner.peer_id)
    blob = signed(owner, key, expiration)
    subkey, value = MSGPackSerializer.dumps(owner.peer_id), MSGPackSerializer.dumps(blob)
    assert validator.validate(DHTRecord(key_id(key), subkey, value, expiration))
    no_subkey = MSGPackSerializer.dumps(None)
    assert not validator.validate(DHTRecord(key_id(key), no_subkey, value, expiration))
    assert not validator.validate(DHTRecord(b"x" * 20, subkey, value, expiration))
    assert not validator.validate(DHTRecord(key_id(key), subkey, MSGPackSerializer.dumps("text"), expiration))
    assert not validator.validate(DHTRecord(key_id(key), b"", value, expiration))
    assert not validator.validate(DHTRecord(key_id(key), subkey, b"", math.nan))


def test_one_peer_that_lies_about_a_version_does_not_hide_it() -> None:
    liar = ModelRecord(version="v", model="x", num_blocks=99)
    honest = ModelRecord(version="v", model="m", num_blocks=4)
    renamed = ModelRecord(version="v", model="copy", num_blocks=4)
    gone = ModelRecord(version="", model="", num_blocks=0)
    for records in ([liar, liar, honest, honest, renamed, gone], [renamed, honest, honest, gone, liar]):
        assert majority(records) == {"v": ModelInfo("m", 4, 3)}


def test_users_of_another_version_see_the_blocks_that_it_has_too() -> None:
    info = msgspec.structs.replace(
        INFO,
        also=(("v2", 1, 3), ("v3", 0, 4)),
        adapters=("mine",),
        mobility="loads-first",
        target=(4, 8),
        needs=((0, 2, 0, 8), (2, 3, 0, 4), (3, 4, 0, 4)),
    )
    check_server_info(info)
    assert info.of("v1") is info
    assert info.of("v4") is None
    seen = info.of("v2")
    assert seen is not None
    check_server_info(seen)
    assert (seen.version, seen.start, seen.end, seen.also) == ("v2", 1, 3, ())
    assert seen.needs == ((1, 2, 0, 8), (2, 3, 0, 4))
    assert (seen.adapters, seen.mobility, seen.target) == ((), "pinned", None)


def test_a_record_of_another_version_belongs_under_its_key(owner: Identity) -> None:
    info, expiration = msgspec.structs.replace(INFO, also=(("v2", 1, 3),)), soon()
    key, seen = own_server_key("v2", owner.peer_id), info.of("v2")
    assert seen is not None
    record = ServerRecord(info=seen)
    assert open_record(key_id(key), owner.peer_id, sign_record(owner, key, record, expiration), expiration) == record
    blob = sign_record(owner, key, ServerRecord(info=info), expiration)
    with pytest.raises(ProtocolError, match="wrong key"):
        open_record(key_id(key), owner.peer_id, blob, expiration)
