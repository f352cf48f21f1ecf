"""Parses the header of a GGUF file, which tells the bytes of each tensor.

A file starts with ``GGUF``, a version, the numbers of tensors and of metadata, the metadata, the tensors' names,
shapes, types and places (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Headers are untrusted: nothing is
allocated for a number in them, only for bytes that are there.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from swarm_plugins.errors import CheckpointError, UnsupportedError

MAX_HEADER_BYTES = 256 << 20
"""Largest header that is read: a vocabulary of a million tokens takes about 40 MB."""
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_KEY = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_SIZE = 1 << 48
# Of metadata, by the type's number.
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9

Value = int | float | bool | str


BLOCK_SIZES: Mapping[str, tuple[int, int]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "MXFP4": (32, 17),
    "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
"""Weights and bytes of a block, by the name of ggml's type: the types that are read."""
PLAIN_TYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Those of one weight a block."""
_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    30: "BF16", 39: "MXFP4",
}  # fmt: skip
"""By ggml's number."""
_MOST_ENTRIES = 1 << 16
"""Tensors, and settings: large mixtures have a few thousand tensors."""
_MOST_STRINGS = 1 << 21
"""In all lists: vocabularies have a few hundred thousand, and as many merges."""
_MAX_TEXT_BYTES = (1 << 16) - 1
"""Of a name, as the format has it. Longer values, such as templates of chats, are skipped: none is asked for."""


class GgufTensor(NamedTuple):
    """Type and place of a tensor."""

    name: str
    """As GGUF has it, such as ``blk.0.attn_q.weight``."""
    kind: str
    """Name of ggml's type."""
    shape: tuple[int, ...]
    """The innermost dimension last, as in torch."""
    start: int
    """First byte, counted from the beginning of the file."""
    end: int
    """One past the last byte."""


class GgufHeader(NamedTuple):
    """What a header says."""

    metadata: Mapping[str, Value]
    """Without arrays."""
    tensors: Sequence[GgufTensor]
    num_bytes: int
    """Of the header; the data begins behind it."""


class ShortHeaderError(Exception):
    """The header goes on behind the bytes that were given."""


def parse_gguf(head: bytes, label: str, file_bytes: int | None) -> GgufHeader:
    """Parses the first bytes of a file.

    Args:
        head: At least the header.
        label: Names the file in messages.
        file_bytes: Size of the file, if known.

    Raises:
        ShortHeaderError: If the header does not end within these bytes.
        CheckpointError: If it is corrupt or too large, or tells of tensors beyond the end of the file or in the same
            bytes.
        UnsupportedError: If a tensor has a type that is not read.
    """
    cursor = _Cursor(head, label)
    if cursor.take(len(_MAGIC)) != _MAGIC:
        raise CheckpointError(f"{label} is no GGUF file, it does not begin with GGUF: fetch it again")
    version = cursor.number("<I")
    if version not in _VERSIONS:
        known = ", ".join(map(str, _VERSIONS))
        raise CheckpointError(f"{label} is GGUF of version {version}; known: {known}")
    num_tensors, num_fields = cursor.number("<Q"), cursor.number("<Q")
    if max(num_tensors, num_fields) > _MOST_ENTRIES:
        raise CheckpointError(
            f"the header of {label} counts {num_tensors} tensors and {num_fields} settings, expected at most "
            f"{_MOST_ENTRIES} of each: it is corrupt, fetch the file again"
        )
    # Each takes at least so many bytes: counts that lie end here.
    cursor.expect(num_fields * 12 + num_tensors * 24)
    metadata: dict[str, Value] = {}
    for _ in range(num_fields):
        key = cursor.text()
        value = cursor.value(cursor.number("<I"))
        if value is not None:
            metadata[key] = value
    entries = [_Entry.read(cursor) for _ in range(num_tensors)]
    alignment = metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
    if not (isinstance(alignment, int) and 8 <= alignment <= 1 << 20 and alignment % 8 == 0):
        raise CheckpointError(
            f"{label} has the alignment {repr(alignment)[:100]}, expected a multiple of 8: fetch it again"
        )
    start = -(-cursor.position // alignment) * alignment
    tensors = [one.placed(start, label) for one in entries]
    _check_places(tensors, label, file_bytes)
    return GgufHeader(metadata, tensors, cursor.position)


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, head: bytes, label: str) -> None:
        self.label = label
        self.position = 0
        self._head = head
        self._num_strings = 0

    def expect(self, num_bytes: int) -> None:
        """Checks that so many bytes follow."""
        end = self.position + num_bytes
        if end > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"the header of {self.label} would end behind byte {end}, expected at most {MAX_HEADER_BYTES}: it is "
                "corrupt, fetch the file again"
            )
        if end > len(self._head):
            raise ShortHeaderError

    def skip(self, num_bytes: int) -> None:
        self.expect(num_bytes)
        self.position += num_bytes

    def take(self, num_bytes: int) -> bytes:
        self.skip(num_bytes)
        return self._head[self.position - num_bytes : self.position]

    def number(self, kind: str) -> int:
        found: int = struct.unpack(kind, self.take(struct.calcsize(kind)))[0]
        return found

    def text(self) -> str:
        length = self.number("<Q")
        if length > _MAX_TEXT_BYTES:
            raise CheckpointError(
                f"a name in the header of {self.label} has {length} bytes, expected at most {_MAX_TEXT_BYTES}: it is "
                "corrupt, fetch the file again"
            )
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as exc:
            raise CheckpointError(f"a name in the header of {self.label} is not text: fetch the file again") from exc

    def value(self, kind: int) -> Value | None:
        """Returns a value of the metadata; None for an array or a long text, which are skipped."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            length = self.number("<Q")
            if length > _MAX_TEXT_BYTES:
                self.skip(length)
                return None
            # Tokens need not be text.
            return self.take(length).decode(errors="replace")
        if kind != _ARRAY:
            raise CheckpointError(
                f"the header of {self.label} holds a value of the unknown type {kind}: fetch it again"
            )
        of, length = self.number("<I"), self.number("<Q")
        if of in _SCALARS:
            self.skip(length * struct.calcsize(_SCALARS[of]))
        elif of == _STRING and self._num_strings + length <= _MOST_STRINGS:
            self._num_strings += length
            self.expect(length * 8)
            for _ in range(length):
                self.skip(self.number("<Q"))
        else:
            raise CheckpointError(
                f"the header of {self.label} holds a list of {length} values of type {of}, which is not read: it is "
                "corrupt, fetch the file again"
            )
        return None


class _Entry(NamedTuple):
    """One tensor as the header lists it."""

    name: str
    sizes: tuple[int, ...]
    """The innermost dimension first."""
    kind: int
    offset: int
    """From the beginning of the data."""

    @classmethod
    def read(cls, cursor: _Cursor) -> _Entry:
        name = cursor.text()
        dims = cursor.number("<I")
        if not 1 <= dims <= _MAX_DIMS:
            raise CheckpointError(
                f"{name[:100]!r} in {cursor.label} has {dims} dimensions, expected 1 to {_MAX_DIMS}: fetch it again"
            )
        sizes = tuple(cursor.number("<Q") for _ in range(dims))
        return cls(name, sizes, cursor.number("<I"), cursor.number("<Q"))

    def placed(self, start: int, label: str) -> GgufTensor:
        """Returns the tensor with its bytes in a file whose data begins at ``start``."""
        what = f"tensor {self.name[:100]!r} in {label}"
        kind = _NAMES.get(self.kind)
        if kind is None:
            known = ", ".join(BLOCK_SIZES)
            raise UnsupportedError(
                f"{what} has ggml's type number {self.kind}; known: {known}: quantize the model again to one of them "
                "with llama-quantize"
            )
        block, block_bytes = BLOCK_SIZES[kind]
        if not all(0 < one < _MAX_SIZE for one in self.sizes) or self.sizes[0] % block:
            raise CheckpointError(
                f"{what} has the shape {list(self.sizes)}, whose rows are not whole blocks of {block} weights "
                f"({kind}): the header is corrupt, fetch the file again"
            )
        num_bytes = math.prod(self.sizes) // block * block_bytes
        begin = start + self.offset
        return GgufTensor(self.name, kind, self.sizes[::-1], begin, begin + num_bytes)


def _check_places(tensors: Sequence[GgufTensor], label: str, file_bytes: int | None) -> None:
    if len({one.name for one in tensors}) < len(tensors):
        raise CheckpointError(f"{label} lists a tensor twice: the header is corrupt, fetch the file again")
    ordered = sorted(tensors, key=lambda one: one.start)
    for before, after in pairwise(ordered):
        if after.start < before.end:
            raise CheckpointError(
                f"{label} puts the tensors {before.name[:100]!r} and {after.name[:100]!r} in the same bytes: the "
                "header is corrupt, fetch the file again"
            )
    if ordered and file_bytes is not None and ordered[-1].end > file_bytes:
        raise CheckpointError(
            f"{label} is truncated: tensor {ordered[-1].name[:100]!r} ends at byte {ordered[-1].end}, the file has "
            f"{file_bytes}: fetch it again"
        )
