"""Weights in 4, 3 or 2 bits: groups of columns, each with a scale and an offset of its own.

A weight is ``scale * (code - 8) + offset``, the form of torch's 4-bit product on the CPU; scale and offset are bfloat16
because it wants them so, and codes are rounded for the scale and offset that are kept, so that their rounding costs
nothing. With them a weight takes 4.5, 3.5 or 3 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.offload.formats.fitting import codes_of, fit, round_to_nearest
from swarm_plugins.offload.formats.matrices import Part
from swarm_plugins.offload.formats.nibbles import TILE_ROWS, fold, folded_bytes, from_tiles, to_tiles, unfold
from swarm_plugins.offload.widths import GROUP_SIZES

__all__ = ["GroupedMatrix", "is_native_order"]

_COLUMN_MULTIPLE = 64
_CODE_OF_OFFSET = 8
# Weights that are fitted at once: temporaries stay in the cache, and small beside the weight.
_CHUNK_WEIGHTS = 1 << 20


@dataclass(frozen=True)
class GroupedMatrix:
    """A weight as codes of few bits, and scale and offset for each group of columns.

    Rows and columns are padded to multiples of 64. On the CPU 3 and 2 bits become 4 for each product, and activations
    are rounded to bfloat16, as torch's product wants it. Elsewhere the weight is widened for each product.

    Args:
        shape: Rows and columns of the weight.
        bits: 4, 3 or 2.
        is_for_cpu: Whether it is multiplied with on the CPU.
    """

    shape: tuple[int, int]
    bits: int
    is_for_cpu: bool = True

    @property
    def stored(self) -> tuple[Part, ...]:
        """Codes and scales."""
        return self._parts(self.bits)

    @property
    def computed(self) -> tuple[Part, ...]:
        """The same, unless this CPU's product takes codes in an order of its own: then 4 bits in that order."""
        return self._parts(4) if self.is_converted else self.stored

    @property
    def is_converted(self) -> bool:
        """Whether this CPU wants its codes in another order than that of the disk."""
        return self.is_for_cpu and not is_native_order()

    def quantize(self, weight: Tensor, *, is_fitted: bool) -> dict[str, Tensor]:
        """Returns codes and scales."""
        padded = self._padded(weight.detach())
        columns = padded.shape[1]
        chunk = max(TILE_ROWS, _CHUNK_WEIGHTS // columns // TILE_ROWS * TILE_ROWS)
        pieces = [self._quantize_rows(piece.float(), is_fitted) for piece in padded.split(chunk)]
        codes, scales = zip(*pieces, strict=True)
        return {"codes": torch.cat(codes), "scales": torch.cat(scales, dim=1)}

    def convert(self, stored: Mapping[str, Tensor], computed: Mapping[str, Tensor]) -> None:
        """Copies, or puts codes in the order of this CPU."""
        codes = stored["codes"]
        if self.is_converted:
            codes = torch._convert_weight_to_int4pack_for_cpu(from_tiles(unfold(codes, self.bits)).int(), 1)
        computed["codes"].copy_(codes.view_as(computed["codes"]))
        computed["scales"].copy_(stored["scales"])

    def product(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """Multiplies rows ``[T, in]``: ``[T, out]``."""
        if not self.is_for_cpu:
            return functional.linear(rows, self.widen(parts, rows.dtype))
        return self._cpu_product(parts, rows).to(rows.dtype)

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Returns the weight ``[out, in]``."""
        if self.is_converted:
            # Nobody but the product knows the order of this CPU's codes.
            identity = torch.eye(self.shape[1], dtype=torch.bfloat16)
            return self._cpu_product(parts, identity).T.to(dtype)
        tiles = unfold(parts["codes"], self.bits)
        rows, columns = self.shape
        codes = from_tiles(tiles)[:rows].reshape(rows, -1, GROUP_SIZES[self.bits])  # [out, groups, size]
        steps = codes.to(torch.int8) - _CODE_OF_OFFSET
        scales, offsets = parts["scales"][:, :rows].float().transpose(0, 1).unsqueeze(-1).unbind(2)  # [out, groups, 1]
        return (steps * scales + offsets).reshape(rows, -1)[:, :columns].to(dtype)

    def _parts(self, bits: int) -> tuple[Part, ...]:
        rows, columns = self._padded_shape
        groups = columns // GROUP_SIZES[self.bits]
        return (
            Part("codes", torch.uint8, (rows // TILE_ROWS, folded_bytes(columns, bits))),
            Part("scales", torch.bfloat16, (groups, rows, 2)),
        )

    @property
    def _padded_shape(self) -> tuple[int, int]:
        rows, columns = self.shape
        return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE

    def _padded(self, weight: Tensor) -> Tensor:
        rows, columns = self._padded_shape
        if weight.shape[1] < columns:
            # Repeated, not zero: the last group's grid stays as narrow as its weights.
            weight = torch.cat([weight, weight[:, -1:].expand(-1, columns - weight.shape[1])], dim=1)
        return functional.pad(weight, (0, 0, 0, rows - weight.shape[0]))

    def _quantize_rows(self, weight: Tensor, is_fitted: bool) -> tuple[Tensor, Tensor]:
        levels = 1 << self.bits
        groups = weight.reshape(weight.shape[0], -1, GROUP_SIZES[self.bits])
        scale, low = (fit if is_fitted else round_to_nearest)(groups, levels)
        kept = torch.cat([scale, low + _CODE_OF_OFFSET * scale], dim=2).to(torch.bfloat16)  # [rows, groups, 2]
        scale, offset = kept.float().split(1, dim=2)
        codes = codes_of(groups, scale, offset - _CODE_OF_OFFSET * scale, levels).to(torch.uint8)
        return fold(to_tiles(codes.flatten(1)), self.bits), kept.transpose(0, 1)

    def _cpu_product(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        height, width = self._padded_shape
        inputs = functional.pad(rows.to(torch.bfloat16), (0, width - rows.shape[1])).contiguous()
        tiles = parts["codes"] if self.is_converted else unfold(parts["codes"], self.bits)
        product = torch._weight_int4pack_mm_for_cpu(
            inputs, tiles.view(height, width // 2), GROUP_SIZES[self.bits], parts["scales"]
        )
        return product[:, : self.shape[0]]


@lru_cache(maxsize=1)
def is_native_order() -> bool:
    """Says whether this CPU's product reads codes in the order in which they are stored."""
    codes = torch.randint(16, (TILE_ROWS, 16), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    return torch.equal(packed.flatten(), to_tiles(codes.to(torch.uint8)).flatten())
