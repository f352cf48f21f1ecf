"""How codes of 4, 3 and 2 bits lie in memory: dense, and as the CPU's product takes them.

Codes of a weight are cut into tiles of 64 rows; a tile holds, for each column, the codes of rows 0 to 31 in the low
halves of 32 bytes and of rows 32 to 63 in the high halves: ``[tiles, columns, 32]``. This is the order in which
torch's product reads them on a CPU with AVX-512, so nothing has to be done after reading. Fewer bits are the same
bytes folded, by operations on whole bytes:

```text
2 bits   [.., 32] -> [.., 16]            the second half fills the empty bits of the first
3 bits   [.., 32] -> [.., 16] + [.., 8]  two bits as above; the third bits, four halves of bytes in one
```
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TILE_ROWS", "fold", "folded_bytes", "from_tiles", "to_tiles", "unfold"]

TILE_ROWS = 64
"""Rows of a tile."""

_HALF = TILE_ROWS // 2
_LOW_TWO_BITS = 0x33
_ONE_BIT = 0x11


def to_tiles(codes: Tensor) -> Tensor:
    """Puts codes of up to 4 bits in tiles.

    Args:
        codes: ``[rows, columns]`` of uint8, rows a multiple of 64.

    Returns:
        ``[rows / 64, columns, 32]`` of uint8.
    """
    halves = codes.reshape(-1, 2, _HALF, codes.shape[1])
    return (halves[:, 0] | (halves[:, 1] << 4)).transpose(1, 2).contiguous()


def from_tiles(tiles: Tensor) -> Tensor:
    """Returns the codes ``[rows, columns]`` of tiles."""
    codes = torch.cat([tiles & 0x0F, tiles >> 4], dim=2)  # [tiles, columns, 64]
    return codes.transpose(1, 2).reshape(-1, tiles.shape[1])


def folded_bytes(bits: int) -> int:
    """Returns how many bytes a tile's 64 codes of one column take."""
    return TILE_ROWS * bits // 8


def fold(tiles: Tensor, bits: int) -> Tensor:
    """Packs tiles of codes below ``2 ** bits`` densely.

    Args:
        tiles: ``[tiles, columns, 32]``.
        bits: 4, 3 or 2.

    Returns:
        ``[tiles, columns, 8 * bits]``.
    """
    if bits == 4:
        return tiles
    low = tiles & _LOW_TWO_BITS
    two_bits = low[..., :16] | (low[..., 16:] << 2)
    if bits == 2:
        return two_bits
    third = (tiles >> 2) & _ONE_BIT
    one_bit = third[..., :8] | (third[..., 8:16] << 1) | (third[..., 16:24] << 2) | (third[..., 24:] << 3)
    return torch.cat([two_bits, one_bit], dim=2)


def unfold(folded: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Returns the tiles ``[tiles, columns, 32]`` that were folded.

    Args:
        folded: ``[tiles, columns, 8 * bits]``.
        bits: 4, 3 or 2.
        out: Where to write them.
    """
    if out is None:
        out = torch.empty(*folded.shape[:2], _HALF, dtype=torch.uint8, device=folded.device)
    if bits == 4:
        return out.copy_(folded)
    out[..., :16] = folded[..., :16] & _LOW_TWO_BITS
    out[..., 16:] = (folded[..., :16] >> 2) & _LOW_TWO_BITS
    if bits == 3:
        for part in range(4):
            out[..., 8 * part : 8 * part + 8] |= ((folded[..., 16:] >> part) & _ONE_BIT) << 2
    return out
