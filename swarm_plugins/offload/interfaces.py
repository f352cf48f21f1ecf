"""The seams of offloading: where an expert lies, what its bytes mean, and how they are lent out.

```text
ExpertStore     where each expert lies: files and byte ranges     (sources of a checkpoint, or a quantized store)
ExpertFormat    stored bytes -> bytes to compute with -> products (plain, int8, int4, ...)
ExpertCache     the experts in memory, bounded in bytes           (tiers, eviction, reading ahead)
```

An expert is one contiguous buffer that holds all its tensors: one read, one copy to the device, one thing to evict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

FLOATS = {str(one).removeprefix("torch."): one for one in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}
"""Types that weights are stored in and computed with, by name."""
# A cache line, enough for every vector instruction.
_ALIGNMENT = 64


class ExpertKey(NamedTuple):
    """One expert of the model."""

    layer: int
    expert: int


class FileIdentity(NamedTuple):
    """Distinguishes a file from another under the same name, and from itself before a write."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file, and where they go in an expert's buffer."""

    path: Path
    start: int
    num_bytes: int
    offset: int
    """First byte in the buffer."""
    tensor: str
    """Name in the file, for messages."""
    identity: FileIdentity | None = None
    """Of the file that ``start`` was found in; None: any file."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an expert, within the expert's buffer."""

    name: str
    """Name of the fused parameter it is a slice of, such as ``gate_up_proj``."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Without the dimension of the experts."""
    offset: int
    """First byte in the buffer."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """How the tensors of an expert lie in its buffer."""

    tensors: tuple[TensorSpec, ...]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> BufferLayout:
        """Lays out tensors, given by name, type and shape, one after the other, each aligned."""
        specs: list[TensorSpec] = []
        end = 0
        for name, dtype, shape in tensors:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            specs.append(TensorSpec(name, dtype, shape, start))
            end = start + specs[-1].num_bytes
        return cls(tuple(specs), end)

    @property
    def alignment(self) -> int:
        """A buffer begins at a multiple of so many bytes."""
        # Integers are codes of a few-bit format, whose products may load whole vectors.
        is_plain = all(spec.dtype.is_floating_point for spec in self.tensors)
        return max((spec.dtype.itemsize for spec in self.tensors), default=1) if is_plain else _ALIGNMENT

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Returns the tensors in a buffer, ``[num_bytes]`` of uint8 at a multiple of `alignment`, without copying."""
        return {
            spec.name: buffer[spec.offset : spec.offset + spec.num_bytes].view(spec.dtype).reshape(spec.shape)
            for spec in self.tensors
        }


class ExpertStore(Protocol):
    """Locates all experts. Thread-safe: it only answers questions."""

    @property
    def num_experts(self) -> Mapping[int, int]:
        """Number of experts of each layer that has any."""

    def stored_layout(self, layer: int) -> BufferLayout:
        """Returns how an expert of a layer lies in its buffer after reading."""

    def ranges(self, key: ExpertKey) -> Sequence[FileRange]:
        """Returns the bytes that make up an expert's stored buffer."""


class ExpertFormat(Protocol):
    """The meaning of the stored bytes of one layer's experts, and how to multiply with them."""

    @property
    def stored(self) -> BufferLayout:
        """The layout on disk and in RAM."""

    @property
    def computed(self) -> BufferLayout:
        """The layout in fast memory; the same object as `stored` if nothing is converted."""

    def check(self, stored: Tensor, key: ExpertKey) -> None:
        """Checks an expert that has been read for the first time; called on reader threads.

        Raises:
            CheckpointError: If a number makes it nonsense; names the tensor.
        """

    def convert(self, stored: Tensor, computed: Tensor) -> None:
        """Fills a buffer to compute with from a stored one (both uint8); called on reader threads."""

    def linear(self, tensors: Mapping[str, Tensor], name: str, rows: Tensor) -> Tensor:
        """Multiplies rows ``[T, in]`` by an expert's weight, without its bias: ``[T, out]`` in the type of the rows.

        ``tensors`` are views of a computed buffer, ``name`` is the fused parameter's. Gradients flow to the rows.
        """

    def bias(self, tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
        """Returns the bias of an expert's weight, ``[out]``, for families that have it."""


class ExpertCache(Protocol):
    """The experts in memory, never more than the budgets allow."""

    @property
    def unused_bytes(self) -> int:
        """Bytes of the budget for fast memory that are not allocated yet."""

    def borrow(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """Yields each of the experts once, those at hand first, the others as they arrive.

        Indices are distinct. A yielded expert stays untouched until the next one is asked for or the iterator is
        closed; so more experts than fit can be borrowed in one call.

        Raises:
            CheckpointError: If an expert cannot be read: names file and tensor.
        """

    def guess(self, layer: int, experts: Sequence[int]) -> None:
        """Announces which experts a later layer will probably need, best guess first; returns at once."""

    def close(self) -> None:
        """Ends the reader threads and frees the memory."""
