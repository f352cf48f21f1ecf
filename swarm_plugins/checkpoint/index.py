"""The list of all tensors of a checkpoint: one safetensors file, or shards with an index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import msgspec

from swarm_plugins.checkpoint.files import CheckpointFiles
from swarm_plugins.checkpoint.headers import LENGTH_BYTES, TensorInfo, header_bytes, parse_header
from swarm_plugins.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
OWN_INDEX_FILE = "swarm.safetensors.index.json"
"""Index of a quantized store; under its own name transformers would load it and make up what is missing."""
# Far above any real index (a trillion-parameter model has about 10 MB).
_MAX_INDEX_BYTES = 500_000_000
# A header spends about 120 bytes on a tensor: enough to get most headers with one request.
_HEADER_BYTES_PER_TENSOR = 160
_HEADER_BYTES_AT_LEAST = 4096


class _IndexFile(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
    metadata: Any = None


class TensorIndex(Mapping[str, TensorInfo]):
    """All tensors by name. A shard's header is read when one of its tensors is first looked up."""

    total_bytes: int | None
    """Size of all tensors, as the checkpoint says; None: it does not."""

    def __init__(self, files: CheckpointFiles) -> None:
        self._files = files
        self._headers: dict[str, dict[str, TensorInfo]] = {}
        self._num_tensors: Counter[str] = Counter()
        names = files.names()
        self._index_file = INDEX_FILE if INDEX_FILE in names else OWN_INDEX_FILE
        # Of a single file and an index, left by two saves, transformers takes the file.
        if SINGLE_FILE in names and OWN_INDEX_FILE not in names:
            self._file_of = dict.fromkeys(self._header(SINGLE_FILE), SINGLE_FILE)
            self.total_bytes = sum(info.num_bytes for info in self._headers[SINGLE_FILE].values())
        elif self._index_file in names:
            self._file_of, self.total_bytes = _read_index(files, self._index_file)
            self._num_tensors = Counter(self._file_of.values())
        else:
            raise CheckpointError(_no_weights(files.label, names))

    def __getitem__(self, name: str) -> TensorInfo:
        file = self._file_of[name]
        header = self._headers.get(file) or self._header(file)
        if name not in header:
            raise CheckpointError(
                f"{self._index_file} of {self._files.label} says that {file} holds the tensor {name!r}, but it does "
                "not: index and shards are of different checkpoints, fetch them again"
            )
        return header[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __contains__(self, name: object) -> bool:
        # Mapping's own calls __getitem__, which reads a header.
        return name in self._file_of

    def load_all(self) -> None:
        """Reads all headers, so that every fault shows now.

        Raises:
            CheckpointError: If a shard is missing or corrupt, or lacks a tensor that the index puts there.
        """
        for name in self._file_of:
            self[name]

    def _header(self, file: str) -> dict[str, TensorInfo]:
        guess = max(_HEADER_BYTES_AT_LEAST, self._num_tensors[file] * _HEADER_BYTES_PER_TENSOR)
        label = f"{self._files.label}/{file}"
        head, size = self._files.head(file, guess)
        end = LENGTH_BYTES + header_bytes(head, label, size)
        if len(head) < end:
            head, size = self._files.head(file, end)
        if len(head) < end:
            raise CheckpointError(
                f"{label} is truncated: its header ends at byte {end}, found {len(head)} bytes: fetch it again"
            )
        self._headers[file] = parse_header(head[LENGTH_BYTES:end], file, size, label=label)
        return self._headers[file]


def _read_index(files: CheckpointFiles, name: str) -> tuple[dict[str, str], int | None]:
    path = files.path(name)
    label = f"{files.label}/{name}"
    try:
        size = path.stat().st_size
        if size > _MAX_INDEX_BYTES:
            raise CheckpointError(f"{label} is too large for an index: {size} bytes, at most {_MAX_INDEX_BYTES}")
        index = msgspec.json.decode(path.read_bytes(), type=_IndexFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise CheckpointError(f"{label} is corrupt ({exc}): fetch it again") from exc
    except FileNotFoundError as exc:
        raise CheckpointError(f"{label} is missing: fetch it again") from exc
    for name, file in index.weight_map.items():
        _check_shard_name(name, file, label)
    total = index.metadata.get("total_size") if isinstance(index.metadata, dict) else None
    return index.weight_map, total if isinstance(total, int) else None


def _check_shard_name(name: str, file: str, label: str) -> None:
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts or "\\" in file or "\0" in file or path.suffix != ".safetensors":
        raise CheckpointError(
            f"{label} puts the tensor {name!r} in {file!r}, expected the name of a .safetensors file inside the "
            "checkpoint: do not trust this checkpoint"
        )


def _no_weights(label: str, names: Sequence[str]) -> str:
    found = sorted(names)
    pickled = [
        name for name in found if name.endswith((".bin", ".pt", ".pth", ".ckpt")) and "training_args" not in name
    ]
    message = f"{label} has no {SINGLE_FILE} and no {INDEX_FILE}, the weights that can be read in part"
    if pickled:
        return (
            f"{message}; pickled weights ({pickled[0]}) are not supported, since reading them can run code: convert "
            "them once with AutoModelForCausalLM.from_pretrained(...).save_pretrained(NEW_DIRECTORY) if you trust them"
        )
    if "adapter_config.json" in found:
        return f"{message}; it holds an adapter: give the base model that adapter_config.json names instead"
    return f"{message}; it has {', '.join(found[:20]) or 'no files'}: give a directory that has them, or fetch it again"
