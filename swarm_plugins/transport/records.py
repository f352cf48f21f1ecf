"""DHT records: small, typed, signed by their owner, and expiring.

| key | subkey | record |
|---|---|---|
| ``swarm_plugins/1/servers/<model version>/<shard>`` | peer id | ``ServerRecord``: what the peer serves |
| ``swarm_plugins/1/models/<shard>`` | peer id | ``ModelRecord``: which model version the peer serves |
| ``swarm_plugins/1/runs/<hash of the run's id>`` | peer id | ``RunRecord``: the peer takes part in a run |

A peer's id determines its shard; shards keep each value small. Keys per version need a handful of look-ups, where keys
per block would store and fetch a server's record once for each of its blocks.

Every node accepts a record, on storing and again on reading, only if its public key hashes to the subkey, its signature
covers key, expiration and payload, and its payload belongs under its key.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
import time
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, cast

import msgspec
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase

from swarm_plugins.errors import ConfigError, ProtocolError
from swarm_plugins.transport.identity import Identity, is_signed_by, peer_id_of
from swarm_plugins.transport.limits import MAX_ALSO
from swarm_plugins.transport.server_info import ServerInfo

MAX_RECORD_BYTES = 4096
"""Largest signed record."""

MAX_TTL_S = 3600.0
"""Longest life of a record."""

MAX_EXPERTS = 65_536
"""Most experts of a block."""

MAX_SLICES = 1024
"""Most parts that experts may be cut into."""

MAX_NEEDS = 64
"""Most runs of blocks for which a server may need experts of other peers."""

MAX_ROUND_TRIPS = 16
"""Most other servers to which a server may announce its round trip: with them a record has room for adapters still."""

_LEAST_THROUGHPUT = 1e-6
"""Tokens per second, where they are known: the inverse of a smaller number may be infinite."""
_LONGEST_ROUND_TRIP_S = 60.0
_CLOCK_SLACK_S = 120.0
_NUM_SHARDS = 4
_MAX_BLOCKS = 100_000
_MAX_NAME_CHARS = 512
_MAX_ADAPTERS = 1024
_MAX_CODECS = 16
_DOMAIN = b"swarm_plugins/record/1\0"


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True, tag="server", forbid_unknown_fields=True):
    """A peer serves blocks of a model version."""

    info: ServerInfo


class GoneRecord(msgspec.Struct, frozen=True, kw_only=True, tag="gone", forbid_unknown_fields=True):
    """A peer has stopped serving; replaces its record, because a DHT cannot delete."""

    version: str


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True, tag="model", forbid_unknown_fields=True):
    """A peer serves a model version, or with an empty one has stopped serving."""

    version: str
    model: str
    num_blocks: int


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, tag="run", forbid_unknown_fields=True):
    """A peer takes part in a run that is trained together."""

    run: str
    """Hash of the run's id, in hexadecimal digits."""


Record = ServerRecord | GoneRecord | ModelRecord | RunRecord


class _Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    public_key: bytes
    signature: bytes
    payload: bytes


_record_decoder = msgspec.msgpack.Decoder(Record)
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
_bytes_decoder = msgspec.msgpack.Decoder(bytes)


class ModelInfo(NamedTuple):
    """An announced model version."""

    model: str
    """Display name."""
    num_blocks: int
    """Blocks of the whole model."""
    num_servers: int
    """Peers that announce parts of it, with this number of blocks."""


def majority(records: Iterable[ModelRecord]) -> dict[str, ModelInfo]:
    """Returns the majority's claims about each model version, from one record per peer; a liar cannot hide the rest.

    That is, by version: the number of blocks most peers agree on, these peers' most common name, and their number.
    """
    names: dict[tuple[str, int], Counter[str]] = {}
    for record in records:
        if record.version:
            names.setdefault((record.version, record.num_blocks), Counter())[record.model] += 1
    found: dict[str, ModelInfo] = {}
    for (version, num_blocks), models in names.items():
        if version not in found or models.total() > found[version].num_servers:
            found[version] = ModelInfo(models.most_common(1)[0][0], num_blocks, models.total())
    return found


def server_keys(version: str) -> list[str]:
    """Returns the keys of all servers of a model version."""
    return [f"swarm_plugins/1/servers/{version}/{shard}" for shard in range(_NUM_SHARDS)]


def model_keys() -> list[str]:
    """Returns the keys of all model versions."""
    return [f"swarm_plugins/1/models/{shard}" for shard in range(_NUM_SHARDS)]


def run_key(run: str) -> str:
    """Returns the key of all peers of a run; they are few."""
    return f"swarm_plugins/1/runs/{run}"


def own_server_key(version: str, peer_id: str) -> str:
    """Returns the key of one server's ``ServerRecord``."""
    return server_keys(version)[_shard_of(peer_id)]


def own_model_key(peer_id: str) -> str:
    """Returns the key of one server's ``ModelRecord``."""
    return model_keys()[_shard_of(peer_id)]


def sign_record(identity: Identity, key: str, record: Record, expiration: float) -> bytes:
    """Returns a signed record in the form the DHT stores; raises ConfigError if it is too large.

    Without round trips if it would be too large with them: clients ask servers themselves.
    """
    payload = msgspec.msgpack.encode(record)
    signature = identity.sign(_signed_bytes(key_id(key), expiration, payload))
    blob = msgspec.msgpack.encode(_Envelope(identity.public_key, signature, payload))
    if len(blob) > MAX_RECORD_BYTES:
        if isinstance(record, ServerRecord) and record.info.round_trips:
            shorter = ServerRecord(info=msgspec.structs.replace(record.info, round_trips=()))
            return sign_record(identity, key, shorter, expiration)
        raise ConfigError(
            f"the announcement takes {len(blob)} bytes, the limit is {MAX_RECORD_BYTES}: announce fewer adapters"
        )
    return blob


def open_record(hashed_key: bytes, peer_id: str, blob: bytes, expiration: float) -> Record:
    """Checks and decodes a record stored under the subkey ``peer_id`` that expires at a Unix time.

    Raises:
        ProtocolError: If it is malformed, too long-lived, not signed by its owner, or under a wrong key.
    """
    now = time.time()
    if not math.isfinite(expiration) or not now - _CLOCK_SLACK_S < expiration <= now + MAX_TTL_S + _CLOCK_SLACK_S:
        raise ProtocolError(f"record expires at {expiration!r}, the limit is {MAX_TTL_S:g} s from now ({now:.0f})")
    if len(blob) > MAX_RECORD_BYTES:
        raise ProtocolError(f"record has {len(blob)} bytes, the limit is {MAX_RECORD_BYTES}")
    return _open_signed(hashed_key, peer_id, blob, expiration)


def check_server_info(info: ServerInfo) -> None:
    """Sanity-checks a server's claims about itself; raises ProtocolError if a number or name is out of range."""
    if not 0 <= info.start < info.end <= info.num_blocks <= _MAX_BLOCKS:
        raise ProtocolError(f"server claims blocks [{info.start}, {info.end}) of {info.num_blocks}")
    _check_figures(info)
    for start, end in (info.target or (0, 1), info.leaving or (0, 1)):
        if not 0 <= start < end <= info.num_blocks:
            raise ProtocolError(f"server claims to move to or from blocks [{start}, {end}) of {info.num_blocks}")
    most = (info.max_batch_tokens, info.max_session_tokens)
    counts = (info.free_kv_tokens, info.total_kv_tokens, info.kv_row_tokens, info.served_tokens, *most)
    if not all(0 <= value < 1 << 53 for value in (*counts, info.kv_token_bytes, info.kv_row_bytes)):
        raise ProtocolError(
            f"server claims impossible token counts {counts}, or sessions of {info.kv_token_bytes} bytes a token and "
            f"{info.kv_row_bytes} a row"
        )
    _check_experts(info)
    others = [other for other, _, _ in info.also]
    spans_fit = all(info.start <= start < end <= info.end for _, start, end in info.also)
    if len(others) > MAX_ALSO or len({info.version, *others}) <= len(others) or not spans_fit:
        raise ProtocolError(
            f"server claims other versions {info.also[: MAX_ALSO + 1]} of its blocks [{info.start}, {info.end})"
        )
    names = (
        info.version,
        info.model,
        info.software,
        info.dtype,
        info.quantization,
        *info.adapters,
        *info.adapter_digests,
        *info.codecs,
        *others,
    )
    # They are shown to people: no line breaks, no terminal sequences.
    if not all((info.version, *others)) or any(len(name) > _MAX_NAME_CHARS or not name.isprintable() for name in names):
        raise ProtocolError(f"server claims names that are empty, not printable or above {_MAX_NAME_CHARS} characters")
    if len(info.codecs) > _MAX_CODECS:
        raise ProtocolError(f"server claims {len(info.codecs)} codecs, the limit is {_MAX_CODECS}")
    if (num_adapters := max(len(info.adapters), len(info.adapter_digests))) > _MAX_ADAPTERS:
        raise ProtocolError(f"server claims {num_adapters} adapters, the limit is {_MAX_ADAPTERS}")


def possible_round_trips(info: ServerInfo) -> dict[str, float]:
    """Returns the seconds to other servers and back that a server announces, without those that cannot be."""
    if len(info.round_trips) > MAX_ROUND_TRIPS:
        return {}
    return {
        peer: seconds
        for peer, seconds in info.round_trips
        if 0.0 <= seconds <= _LONGEST_ROUND_TRIP_S and len(peer) <= _MAX_NAME_CHARS
    }


def _check_figures(info: ServerInfo) -> None:
    figures = (info.throughput, info.decode_s, info.load, info.network_tokens_s)
    if not all(math.isfinite(value) and value >= 0 for value in figures):
        raise ProtocolError("server claims a throughput, step time or load that is negative or not finite")
    if 0 < info.throughput < _LEAST_THROUGHPUT:
        raise ProtocolError(
            f"server claims a throughput of {info.throughput:g} tokens/s, expected {_LEAST_THROUGHPUT:g} or more, or 0 "
            "for one that is not known"
        )


def _check_experts(info: ServerInfo) -> None:
    held, part = info.experts, info.slice
    if held is not None and not 0 <= held[0] < held[1] <= MAX_EXPERTS:
        raise ProtocolError(f"server claims experts {held}")
    if part is not None and (held is None or not 0 <= part[0] < part[1] <= MAX_SLICES):
        raise ProtocolError(f"server claims slice {part} of experts {held}")
    if len(info.needs) > MAX_NEEDS or (info.needs and held is not None):
        raise ProtocolError(
            f"server claims to need experts of {len(info.needs)} runs of blocks, the limit is {MAX_NEEDS}"
        )
    for start, end, first, last in info.needs:
        if not (info.start <= start < end <= info.end and 0 <= first < last <= MAX_EXPERTS):
            raise ProtocolError(f"server claims to need experts {first}:{last} of blocks {start}:{end}")


class OwnedRecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """Restricts hivemind's DHT to this package's records, each written by its owner."""

    def validate(self, record: DHTRecord) -> bool:
        """Returns whether a record may be stored or trusted."""
        try:
            peer_id = msgspec.msgpack.decode(record.subkey, type=str)
            open_record(record.key, peer_id, _bytes_decoder.decode(record.value), record.expiration_time)
        except (ProtocolError, msgspec.MsgspecError, ValueError, TypeError):
            return False
        return True


# Verifying takes 0.1 ms, and the same records come back with every look-up until they are renewed.
@functools.lru_cache(maxsize=8192)
def _open_signed(hashed_key: bytes, peer_id: str, blob: bytes, expiration: float) -> Record:
    try:
        envelope = _envelope_decoder.decode(blob)
        if peer_id_of(envelope.public_key) != peer_id:
            raise ProtocolError(f"record under {peer_id} comes with the key of {peer_id_of(envelope.public_key)}")
        signed = _signed_bytes(hashed_key, expiration, envelope.payload)
        if not is_signed_by(envelope.public_key, signed, envelope.signature):
            raise ProtocolError(f"record under {peer_id} has a wrong signature")
        record = cast(Record, _record_decoder.decode(envelope.payload))
    except (msgspec.MsgspecError, RecursionError, ValueError) as exc:
        raise ProtocolError(f"malformed record: {exc}") from exc
    if hashed_key != key_id(_key_of(record, peer_id)):
        raise ProtocolError(f"record of {peer_id} is stored under a wrong key")
    if isinstance(record, ServerRecord):
        check_server_info(record.info)
    return record


def _key_of(record: Record, peer_id: str) -> str:
    if isinstance(record, ServerRecord):
        return own_server_key(record.info.version, peer_id)
    if isinstance(record, GoneRecord):
        return own_server_key(record.version, peer_id)
    if isinstance(record, RunRecord):
        return run_key(record.run)
    if max(len(record.version), len(record.model)) > _MAX_NAME_CHARS or not 0 <= record.num_blocks <= _MAX_BLOCKS:
        raise ProtocolError("model record with impossible names or numbers")
    if not (record.version.isprintable() and record.model.isprintable()):
        raise ProtocolError("model record with control characters in a name")
    return own_model_key(peer_id)


def _shard_of(peer_id: str) -> int:
    return hashlib.blake2b(peer_id.encode(), digest_size=1).digest()[0] % _NUM_SHARDS


@functools.lru_cache(maxsize=4096)
def key_id(key: str) -> bytes:
    """Returns the hash under which the DHT stores a key."""
    return cast(bytes, DHTID.generate(source=key).to_bytes())


def _signed_bytes(hashed_key: bytes, expiration: float, payload: bytes) -> bytes:
    return _DOMAIN + hashed_key + struct.pack(">d", expiration) + payload
