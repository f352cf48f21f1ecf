"""Parses safetensors headers, which tell the bytes of each tensor in a file.

A file starts with the header's length (8 bytes, little endian), then the header (JSON), then the tensors.
Headers are untrusted: every number is checked before it is used, so that a corrupt or hostile file ends in
an error and not in a huge allocation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import msgspec
import torch

from swarm_plugins.errors import CheckpointError

LENGTH_BYTES = 8
"""Size of the length that a file starts with."""
MAX_HEADER_BYTES = 100_000_000
"""Largest header that is read, as in safetensors itself."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns what headers call a type that they know."""
    return next(name for name, one in _DTYPES.items() if one == dtype)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type and place of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    """File of the checkpoint, relative to its root."""
    start: int
    """First byte, counted from the beginning of the file."""
    end: int
    """One past the last byte."""
    packing: str | None = None
    """Name of ggml's type, if the last dimension is bytes of its blocks."""
    change: Callable[[torch.Tensor], torch.Tensor] | None = None
    """What makes of these bytes the tensor that transformers has."""

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


# Bounded before they are multiplied: the product of 200,000 large sizes takes two minutes.
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_MAX_DIMS = 64


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=_MAX_DIMS)]
    data_offsets: tuple[_Size, _Size]


def header_bytes(prefix: bytes, file: str, file_bytes: int | None) -> int:
    """Returns the length of the header, from the first 8 bytes of a file.

    Raises:
        CheckpointError: If there are fewer than 8 bytes, or the length is absurd.
    """
    if len(prefix) < LENGTH_BYTES:
        raise CheckpointError(
            f"{file} is not a safetensors file: it has {len(prefix)} bytes, the header's length alone takes "
            f"{LENGTH_BYTES}; fetch it again"
        )
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file} is corrupt or not a safetensors file: it announces a header of {length} bytes, expected 2 to "
            f"{MAX_HEADER_BYTES}; fetch it again"
        )
    if file_bytes is not None and LENGTH_BYTES + length > file_bytes:
        raise CheckpointError(
            f"{file} is truncated: its header ends at byte {LENGTH_BYTES + length}, the file has {file_bytes} bytes: "
            "fetch it again"
        )
    return length


def parse_header(
    header: bytes, file: str, file_bytes: int | None, *, label: str | None = None
) -> dict[str, TensorInfo]:
    """Returns the tensors that a header lists.

    Raises:
        CheckpointError: If the header is malformed, two tensors share bytes, or one lies beyond the end of the file.
    """
    label = label or file
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(value, type=_Entry) for name, value in raw.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise CheckpointError(f"{label} has a corrupt safetensors header ({exc}): fetch it again") from exc
    data_start = LENGTH_BYTES + len(header)
    tensors = {name: _tensor_info(name, entry, file, data_start, label) for name, entry in entries.items()}
    _check_apart(tensors.values(), label)
    if file_bytes is not None:
        _check_ends(tensors, label, file_bytes)
    return tensors


def _tensor_info(name: str, entry: _Entry, file: str, data_start: int, label: str) -> TensorInfo:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise CheckpointError(
            f"tensor {name!r} in {label} has the type {entry.dtype!r}, which this torch ({torch.__version__}) cannot "
            f"hold; known: {', '.join(_DTYPES)}"
        )
    start, end = entry.data_offsets
    needed = math.prod(entry.shape) * dtype.itemsize
    if end - start != needed:
        raise CheckpointError(
            f"tensor {name!r} in {label} has shape {list(entry.shape)} of {entry.dtype}, which takes {needed} bytes, "
            f"but lies at bytes {start} to {end}: the header is corrupt, fetch the file again"
        )
    return TensorInfo(name, dtype, entry.shape, file, data_start + start, data_start + end)


def _check_apart(tensors: Collection[TensorInfo], label: str) -> None:
    """Refuses tensors that share bytes: a file of 10 MB could stand for any number of tensors of 9 MB."""
    ordered = sorted((info for info in tensors if info.num_bytes), key=lambda info: info.start)
    for before, after in pairwise(ordered):
        if after.start < before.end:
            raise CheckpointError(
                f"{label} puts the tensors {before.name!r} and {after.name!r} in the same bytes: the header is "
                "corrupt, fetch the file again"
            )


def _check_ends(tensors: dict[str, TensorInfo], label: str, file_bytes: int) -> None:
    beyond = [info for info in tensors.values() if info.end > file_bytes]
    if beyond:
        first = min(beyond, key=lambda info: info.start)
        expected = max(info.end for info in beyond)
        raise CheckpointError(
            f"{label} is truncated: tensor {first.name!r} ends at byte {first.end} and the whole file should have "
            f"{expected} bytes, found {file_bytes}: fetch it again"
        )
