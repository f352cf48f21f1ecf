"""How codes of 4, 3 and 2 bits lie in memory: dense, and as the CPU's product takes them.

Codes of a weight are cut into tiles of 64 rows; a tile holds, for each column, the codes of rows 0 to 31 in the low
halves of 32 bytes and of rows 32 to 63 in the high halves: ``[tiles, columns * 32]``. This is the order in which
torch's product reads them on a CPU with AVX-512, so nothing has to be done after reading. Fewer bits are the same
bytes folded by a few operations on long runs of bytes, so that they are unfolded about as fast as memory is read:

```text
2 bits   [.., C * 32] -> [.., C * 16]                 the second half fills the empty bits of the first
3 bits   [.., C * 32] -> [.., C * 16] + [.., C * 8]   two bits as above; the third bits, four quarters in one
```
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TILE_ROWS", "fold", "folded_bytes", "from_tiles", "to_tiles", "unfold"]

TILE_ROWS = 64
"""Rows of a tile."""

_HALF = TILE_ROWS // 2
# Of every half byte, eight bytes at a time. A shift drags in bits of the neighbour: they are masked away.
_LOW_TWO_BITS = 0x3333333333333333
_LOW_BIT = 0x1111111111111111


def folded_bytes(columns: int, bits: int) -> int:
    """Returns how many bytes a tile takes."""
    return columns * TILE_ROWS * bits // 8


def to_tiles(codes: Tensor) -> Tensor:
    """Puts codes of up to 4 bits in tiles.

    Args:
        codes: ``[rows, columns]`` of uint8, rows a multiple of 64.

    Returns:
        ``[rows / 64, columns * 32]`` of uint8.
    """
    halves = codes.reshape(-1, 2, _HALF, codes.shape[1])
    return (halves[:, 0] | (halves[:, 1] << 4)).transpose(1, 2).flatten(1)


def from_tiles(tiles: Tensor) -> Tensor:
    """Returns the codes ``[rows, columns]`` of tiles."""
    tiles = tiles.unflatten(1, (-1, _HALF))
    codes = torch.cat([tiles & 0x0F, tiles >> 4], dim=2)  # [tiles, columns, 64]
    return codes.transpose(1, 2).reshape(-1, tiles.shape[1])


def fold(tiles: Tensor, bits: int) -> Tensor:
    """Packs tiles of codes below ``2 ** bits`` densely.

    Args:
        tiles: ``[tiles, columns * 32]``.
        bits: 4, 3 or 2.

    Returns:
        ``[tiles, columns * 8 * bits]``.
    """
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
    """Returns the tiles that were folded.

    Args:
        folded: ``[tiles, columns * 8 * bits]``.
        bits: 4, 3 or 2.
    """
    if bits == 4:
        return folded
    words = folded.view(torch.int64)
    half = words.shape[1] if bits == 2 else words.shape[1] * 2 // 3
    tiles = words.new_empty(words.shape[0], 2 * half)
    torch.bitwise_and(words[:, :half], _LOW_TWO_BITS, out=tiles[:, :half])
    torch.bitwise_right_shift(words[:, :half], 2, out=tiles[:, half:]).bitwise_and_(_LOW_TWO_BITS)
    if bits == 3:
        for part, quarter in enumerate(tiles.chunk(4, dim=1)):
            quarter |= ((words[:, half:] >> part) & _LOW_BIT) << 2
    return tiles.view(torch.uint8)
