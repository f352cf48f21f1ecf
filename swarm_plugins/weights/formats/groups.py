"""Weights in 4, 3 or 2 bits: each group of columns has a scale and an offset of its own.

A weight is ``scale * (code - 8) + offset``, the form of torch's 4-bit product on the CPU, which takes scale and offset
as bfloat16. Codes are rounded for the kept scale and offset, so that rounding those costs nothing. With them a weight
takes 4.5, 3.5 or 3 bits.

Codes are cut into tiles of 64 rows. For each column a tile holds the codes of rows 0 to 31 in the low halves of 32
bytes and of rows 32 to 63 in the high halves: ``[tiles, columns * 32]``. A CPU with AVX-512 reads them in this order,
so nothing has to be done after reading. Fewer bits are the same bytes, folded by a few operations on long runs of
bytes and unfolded about as fast as memory is read:

```text
2 bits   [.., C * 32] -> [.., C * 16]                 the second half fills the empty bits of the first
3 bits   [.., C * 32] -> [.., C * 16] + [.., C * 8]   two bits as above; the third bits, four quarters in one
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.weights.fitting import codes_of, fit, round_to_nearest
from swarm_plugins.weights.stored import Part, QuantizingFormat
from swarm_plugins.weights.widths import GROUP_SIZES

TILE_ROWS = 64
_HALF = TILE_ROWS // 2
# Of every half byte, eight bytes at a time. A shift drags in bits of the neighbor: they are masked away.
_LOW_TWO_BITS = 0x3333333333333333
_LOW_BIT = 0x1111111111111111
_COLUMN_MULTIPLE = 64
CODE_OF_OFFSET = 8
# Weights fitted at once: temporaries stay in the processor's cache.
_CHUNK_WEIGHTS = 1 << 20


@dataclass(frozen=True)
class GroupedFormat(QuantizingFormat):
    """A weight as codes of few bits, with a scale and an offset per group of columns.

    Rows and columns are padded to multiples of 64.
    """

    shape: tuple[int, int]
    bits: int
    """4, 3 or 2."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Codes in tiles, and for each group of columns the scales and offsets of all rows."""
        return self.parts_of(self.bits)

    def parts_of(self, bits: int) -> tuple[Part, ...]:
        """Returns the parts with codes that take up to 4 bits."""
        rows, columns = self.padded_shape
        return (
            Part("codes", torch.uint8, (rows // TILE_ROWS, columns * TILE_ROWS * bits // 8)),
            *self.grid_parts,
        )

    @property
    def grid_parts(self) -> tuple[Part, ...]:
        """All parts except the codes."""
        return (Part("scales", torch.bfloat16, self.grids_shape),)

    @property
    def grids_shape(self) -> tuple[int, int, int]:
        rows, columns = self.padded_shape
        return (columns // self.group_size, rows, 2)

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return GROUP_SIZES[self.bits]

    @cached_property
    def padded_shape(self) -> tuple[int, int]:
        rows, columns = self.shape
        return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE

    def quantize(self, weight: Tensor, *, is_fitted: bool) -> dict[str, Tensor]:
        padded = self._padded(weight.detach())
        chunk = max(TILE_ROWS, _CHUNK_WEIGHTS // padded.shape[1] // TILE_ROWS * TILE_ROWS)
        levels, choose = 1 << self.bits, fit if is_fitted else round_to_nearest
        chosen = [torch.cat(choose(self._groups(piece), levels), dim=2) for piece in padded.split(chunk)]
        parts = self.keep(*torch.cat(chosen).transpose(0, 1).unbind(2))
        grids = self.grids(parts).transpose(0, 1).split(chunk)
        codes = [self._codes(piece, kept) for piece, kept in zip(padded.split(chunk), grids, strict=True)]
        return {"codes": torch.cat(codes), **parts}

    def keep(self, scale: Tensor, low: Tensor) -> dict[str, Tensor]:
        """Returns the parts for scale and lowest level of each group, ``[groups, rows]`` each."""
        return {"scales": torch.stack([scale, low + CODE_OF_OFFSET * scale], dim=2).to(torch.bfloat16)}

    def grids(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Returns scale and offset of each group, ``[groups, rows, 2]`` of bfloat16."""
        return parts["scales"]

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        rows, columns = self.shape
        codes = from_tiles(unfold(parts["codes"], self.bits))[:rows].reshape(rows, -1, self.group_size)
        steps = codes.to(torch.int8) - CODE_OF_OFFSET  # [out, groups, size]
        # Contiguous: otherwise the loops over them would be short ones.
        scales, offsets = self.grids(parts)[:, :rows].float().permute(2, 1, 0).unsqueeze(-1).contiguous()
        return steps.float().mul_(scales).add_(offsets).view(rows, -1)[:, :columns].to(dtype)

    def _padded(self, weight: Tensor) -> Tensor:
        if self.padded_shape == tuple(weight.shape):
            return weight
        # Repeated, not zero: the last groups keep grids as narrow as their weights.
        rows, columns = (
            torch.arange(size, device=weight.device).clamp_(max=own - 1)
            for size, own in zip(self.padded_shape, self.shape, strict=True)
        )
        return weight[rows][:, columns]

    def _groups(self, weight: Tensor) -> Tensor:
        return weight.float().reshape(weight.shape[0], -1, self.group_size)

    def _codes(self, weight: Tensor, grids: Tensor) -> Tensor:
        scale, offset = grids.float().split(1, dim=2)
        codes = codes_of(self._groups(weight), scale, offset - CODE_OF_OFFSET * scale, 1 << self.bits).to(torch.uint8)
        return fold(to_tiles(codes.flatten(1)), self.bits)


@dataclass(frozen=True)
class SizedGroups(GroupedFormat):
    """Codes and scales that others have chosen, with groups of their size."""

    size: int
    """Columns that share a scale."""

    @property
    def group_size(self) -> int:
        return self.size

    def arranged(self, codes: Tensor, scales: Tensor, offsets: Tensor) -> dict[str, Tensor]:
        """Returns the parts of weights that have been rounded already, ``scale * (code - 8) + offset`` of 4 bits each.

        Args:
            codes: ``[out, in]``, unsigned.
            scales: ``[out, groups]``, to be rounded to bfloat16.
            offsets: Likewise.
        """
        rows, columns = self.padded_shape
        below, beside = rows - codes.shape[0], columns - codes.shape[1]
        tiles = to_tiles(functional.pad(codes.to(torch.uint8), (0, beside, 0, below)))
        kept = torch.stack([scales, offsets], dim=2).to(torch.bfloat16).transpose(0, 1)  # [groups, out, 2]
        return {
            "codes": tiles,
            "scales": functional.pad(kept, (0, 0, 0, below, 0, beside // self.group_size)).contiguous(),
        }


def to_tiles(codes: Tensor) -> Tensor:
    """Puts codes ``[rows, columns]`` of up to 4 bits in tiles ``[rows / 64, columns * 32]``; rows a multiple of 64."""
    halves = codes.reshape(-1, 2, _HALF, codes.shape[1])
    return (halves[:, 0] | (halves[:, 1] << 4)).transpose(1, 2).flatten(1)


def from_tiles(tiles: Tensor) -> Tensor:
    """Returns the codes ``[rows, columns]`` of tiles."""
    rows = tiles.unflatten(1, (-1, _HALF)).transpose(1, 2).contiguous()  # [tiles, 32, columns]
    return torch.cat([rows & 0x0F, rows >> 4], dim=1).flatten(0, 1)


def fold(tiles: Tensor, bits: int) -> Tensor:
    """Packs tiles ``[tiles, columns * 32]`` of codes below ``2 ** bits`` densely: ``[tiles, columns * 8 * bits]``."""
    if bits == 4:
        return tiles
    words = tiles.view(torch.int64)
    first, second = (words & _LOW_TWO_BITS).chunk(2, dim=1)
    two_bits = first | (second << 2)
    if bits == 2:
        return two_bits.view(torch.uint8)
    quarters = ((words >> 2) & _LOW_BIT).chunk(4, dim=1)
    third = quarters[0] | (quarters[1] << 1) | (quarters[2] << 2) | (quarters[3] << 3)
    return torch.cat([two_bits, third], dim=1).view(torch.uint8)


def unfold(folded: Tensor, bits: int) -> Tensor:
    """Undoes `fold`."""
    if bits == 4:
        return folded
    words = folded.view(torch.int64)
    half = words.shape[1] if bits == 2 else words.shape[1] * 2 // 3
    tiles = words.new_empty(words.shape[0], 2 * half)
    torch.bitwise_and(words[:, :half], _LOW_TWO_BITS, out=tiles[:, :half])
    torch.bitwise_right_shift(words[:, :half], 2, out=tiles[:, half:]).bitwise_and_(_LOW_TWO_BITS)
    if bits == 3:
        for place, quarter in enumerate(tiles.chunk(4, dim=1)):
            quarter |= ((words[:, half:] >> place) & _LOW_BIT) << 2
    return tiles.view(torch.uint8)
