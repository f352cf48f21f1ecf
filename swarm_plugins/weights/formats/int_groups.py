"""Integers of 2, 4 or 8 bits in words of 32 with a scale for each group of columns, as three packages lay them out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_plugins.weights.stored import Part, PublishedFormat, check_scales

_WORD_BITS = 32
BITS = (2, 4, 8)
"""Widths that do not cross words."""
# Of the eight columns in a word, the one at each place (AutoAWQ's kernels unpack words in this order).
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class IntGroups(PublishedFormat):
    """A weight as ``scale * (code - zero)``, with scales and zeros of groups of columns."""

    shape: tuple[int, int]
    bits: int
    group_size: int
    """Columns that share a scale."""
    scales_dtype: torch.dtype
    is_ordered: bool = False
    """Whether ``order`` tells the group of each column (act-order), and not its place."""

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.shape[1] % self.group_size:
            raise ValueError(f"its {self.shape[1]} columns are not a multiple of the group size {self.group_size}")

    @property
    def num_groups(self) -> int:
        return self.shape[1] // self.group_size

    def checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        check_scales(tensors, "scales")
        if self.is_ordered:
            order = tensors["order"]
            if bool(((order < 0) | (order >= self.num_groups)).any()):
                raise ValueError(f"its order names groups beyond the {self.num_groups} that it has")
        return super().checked(tensors)

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        codes, zeros, scales = self.unpacked(parts)  # [out, in], [out, groups] or a number, [out, groups]
        if self.is_ordered:
            order = parts["order"].long()
            steps = codes - (zeros[:, order] if isinstance(zeros, Tensor) else zeros)
            return (steps.float() * scales[:, order].float()).to(dtype)
        steps = codes.reshape(self.shape[0], -1, self.group_size)
        steps = steps - (zeros.unsqueeze(-1) if isinstance(zeros, Tensor) else zeros)
        return steps.float().mul_(scales.float().unsqueeze(-1)).reshape(self.shape).to(dtype)

    @abstractmethod
    def unpacked(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | int, Tensor]:
        """Returns codes ``[out, in]``, zeros ``[out, groups]`` or one for all, and scales ``[out, groups]``."""

    def _order(self) -> tuple[Part, ...]:
        return (Part("order", torch.int32, (self.shape[1],)),) if self.is_ordered else ()

    def _words(self, count: int) -> int:
        return -(-count * self.bits // _WORD_BITS)


@dataclass(frozen=True)
class PackQuantizedFormat(IntGroups):
    """compressed-tensors' ``pack-quantized``: words along the columns; zeros along the rows, or none."""

    has_zeros: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        rows, columns = self.shape
        zeros = Part("zeros", torch.int32, (self._words(rows), self.num_groups))
        return (
            Part("codes", torch.int32, (rows, self._words(columns))),
            Part("scales", self.scales_dtype, (rows, self.num_groups)),
            *((zeros,) if self.has_zeros else ()),
            *self._order(),
        )

    def checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stated = tensors["shape"].tolist()
        if stated != list(self.shape):
            raise ValueError(f"its shape is said to be {stated}, the model's is {list(self.shape)}")
        return super().checked(tensors)

    def unpacked(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | int, Tensor]:
        codes = _unpack(parts["codes"], self.bits)[:, : self.shape[1]]
        if not self.has_zeros:
            return codes, 1 << (self.bits - 1), parts["scales"]
        return codes, _unpack(parts["zeros"].T, self.bits)[:, : self.shape[0]].T, parts["scales"]


@dataclass(frozen=True)
class GptqFormat(IntGroups):
    """GPTQ's layout ``[in, out]``: words of codes along the inputs, of zeros along the outputs."""

    zero_offset: int = 1
    """What to add to a stored zero: 1 in the first version of the format."""

    @property
    def parts(self) -> tuple[Part, ...]:
        rows, columns = self.shape
        return (
            Part("codes", torch.int32, (self._words(columns), rows)),
            Part("scales", self.scales_dtype, (self.num_groups, rows)),
            Part("zeros", torch.int32, (self.num_groups, self._words(rows))),
            *self._order(),
        )

    def unpacked(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | int, Tensor]:
        codes = _unpack(parts["codes"].T, self.bits)[:, : self.shape[1]]
        # On whole words, as it was subtracted: a zero of 0 borrowed from its neighbour.
        words = parts["zeros"] + self.zero_offset * _ones(self.bits)
        return codes, _unpack(words, self.bits)[:, : self.shape[0]].T, parts["scales"].T


@dataclass(frozen=True)
class AwqFormat(IntGroups):
    """AWQ's layout ``[in, out]``: words along the outputs, eight of them in the order 0 2 4 6 1 3 5 7."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape[0] % len(_AWQ_PLACES):
            raise ValueError(f"it has {self.shape[0]} outputs, known are multiples of {len(_AWQ_PLACES)}")

    @property
    def parts(self) -> tuple[Part, ...]:
        rows, columns = self.shape
        return (
            Part("codes", torch.int32, (columns, self._words(rows))),
            Part("scales", self.scales_dtype, (self.num_groups, rows)),
            Part("zeros", torch.int32, (self.num_groups, self._words(rows))),
        )

    def unpacked(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | int, Tensor]:
        codes, zeros = (
            _unpack(parts[name], 4).unflatten(1, (-1, len(_AWQ_PLACES)))[:, :, _AWQ_PLACES].flatten(1).T
            for name in ("codes", "zeros")
        )
        return codes, zeros, parts["scales"].T


def _ones(bits: int) -> int:
    """Returns the word whose codes are all 1."""
    return ((1 << _WORD_BITS) - 1) // ((1 << bits) - 1)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Returns the codes ``[n, m * 32 / bits]`` of words ``[n, m]``, lowest bits first, in the least signed type.

    It holds their differences, too. Bytes of little-endian words are in the order of their bits.
    """
    raw = words.contiguous().view(torch.uint8)
    if bits == 8:
        return raw.to(torch.int16)
    mask = (1 << bits) - 1
    codes = torch.stack([(raw >> shift) & mask for shift in range(0, 8, bits)], dim=-1)
    return codes.view(torch.int8).flatten(1)
