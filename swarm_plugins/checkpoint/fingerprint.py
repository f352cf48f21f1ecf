"""The identity of a local checkpoint, from its content.

Covers the config (without keys that a mere re-save changes), every tensor's name, type and shape, and a sample
of every tensor's bytes: small tensors whole, large ones at spots spread over the tensor. So it does not depend on
where the directory lies, what it is called, or how the tensors are spread over shards.

The trade-off: a full hash of a 100 GB checkpoint takes minutes, this takes seconds (at most about 65,000 small
reads). In return, a change of a few rows inside one large tensor may go unnoticed. Training changes nearly
every weight of the tensors that it trains, and each tensor is sampled at four spots at least, so two fine-tunes of
one model differ; two files that differ in one damaged sector may not. It guards against mix-ups, not against malice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from swarm_plugins.checkpoint.files import Piece, read_pieces
from swarm_plugins.checkpoint.headers import TensorInfo
from swarm_plugins.errors import CheckpointError

_FORMAT = b"swarm_plugins fingerprint 1\n"
VOLATILE = {"_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype", "use_cache", "auto_map"}
"""Settings that a mere re-save changes."""
_WHOLE_BYTES = 64 << 10
# One page: what a disk reads anyway.
_SPOT_BYTES = 4096
_ALL_SPOTS = 1 << 16
_MIN_SPOTS, _MAX_SPOTS = 4, 64


def fingerprint(directory: Path, tensors: Mapping[str, TensorInfo]) -> str:
    """Returns 40 hexadecimal digits that identify a checkpoint: its config and all its tensors.

    Raises:
        CheckpointError: If a file cannot be read.
    """
    return tensors_fingerprint(directory, tensors, config=_config(directory))


def tensors_fingerprint(directory: Path, tensors: Mapping[str, TensorInfo], *, config: bytes = b"") -> str:
    """Returns 40 hexadecimal digits that identify some tensors under given names.

    Raises:
        CheckpointError: If a file cannot be read.
    """
    digest = hashlib.blake2b(_FORMAT + config, digest_size=20)
    num_large = sum(info.num_bytes > _WHOLE_BYTES for info in tensors.values())
    spots = min(max(_ALL_SPOTS // max(num_large, 1), _MIN_SPOTS), _MAX_SPOTS)
    # File by file and forwards, so that even a disk with a head is read quickly; joined by name afterwards.
    samples = {
        name: _sample(directory, name, info, spots)
        for name, info in sorted(tensors.items(), key=lambda item: (item[1].file, item[1].start))
    }
    for name in sorted(samples):
        info = tensors[name]
        digest.update(msgspec.json.encode([name, str(info.dtype), info.shape]))
        digest.update(samples[name])
    return digest.hexdigest()


def _config(directory: Path) -> bytes:
    path = directory / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except (msgspec.MsgspecError, OSError, RecursionError, UnicodeDecodeError) as exc:
        raise CheckpointError(f"{path} cannot be read as a JSON object ({exc})") from exc
    kept = {key: value for key, value in config.items() if key not in VOLATILE}
    return msgspec.json.encode(kept, order="deterministic")


def _sample(directory: Path, name: str, info: TensorInfo, spots: int) -> bytes:
    ranges = [(info.start, info.num_bytes)]
    if info.num_bytes > _WHOLE_BYTES:
        ranges = list(_spots(name, info, spots))
    buffers = [bytearray(size) for _, size in ranges]
    pieces = [Piece(start, memoryview(buffer)) for (start, _), buffer in zip(ranges, buffers, strict=True)]
    read_pieces(directory / info.file, pieces, lambda _: None)
    return hashlib.blake2b(b"".join(buffers), digest_size=20).digest()


def _spots(name: str, info: TensorInfo, count: int) -> Iterator[tuple[int, int]]:
    """Yields one spot in each of ``count`` equal parts, at a place given by the name: no pattern can slip through."""
    stride = info.num_bytes // count
    for index in range(count):
        seed = hashlib.blake2b(f"{index} {name}".encode(), digest_size=8).digest()
        offset = int.from_bytes(seed, "little") % max(stride - _SPOT_BYTES, 1)
        start = info.start + index * stride + offset
        yield start, min(_SPOT_BYTES, info.end - start)
