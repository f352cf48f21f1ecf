"""torch's product with 4-bit codes on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from swarm_plugins.weights.formats.groups import TILE_ROWS, GroupedFormat, from_tiles, to_tiles, unfold
from swarm_plugins.weights.kernel import Kernel
from swarm_plugins.weights.stored import Part

_LEAST_GROUP = 32
MOST_ROWS = 64
"""Rows of activations beyond which widening the weight once takes less time."""


@dataclass(frozen=True)
class Int4PackKernel(Kernel):
    """Each product unfolds 3 and 2 bits to 4 and rounds activations to bfloat16, as torch's product requires.

    Without its order of codes, a CPU does not take groups smaller than torch's: see `takes_groups`.
    Products of many rows widen the weight instead: torch's reads it again for every few of them.
    """

    format: GroupedFormat

    @property
    def computed(self) -> tuple[Part, ...]:
        """The stored parts; 4-bit codes if this CPU takes them in an order of its own."""
        return self.format.parts_of(4) if self.is_converted else self.format.parts

    @property
    def is_converted(self) -> bool:
        """Whether this CPU takes codes in another order than the stored one."""
        return not is_native_order()

    def convert(self, stored: Mapping[str, Tensor], computed: Mapping[str, Tensor]) -> None:
        """Copies, or puts codes in this CPU's order."""
        super().convert(stored, {name: one for name, one in computed.items() if name != "codes"})
        codes = stored["codes"]
        if self.is_converted:
            unfolded = from_tiles(unfold(codes, self.format.bits))
            codes = torch._convert_weight_to_int4pack_for_cpu(unfolded.int(), 1)
        computed["codes"].copy_(codes.view_as(computed["codes"]))

    def product(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        if rows.shape[0] > MOST_ROWS:
            return functional.linear(rows, self.widen(parts, rows.dtype))
        return self._product(parts, rows).to(rows.dtype)

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        if not self.is_converted:
            return self.format.widen(parts, dtype)
        # Only the product knows the order of this CPU's codes.
        return self._product(parts, torch.eye(self.format.shape[1], dtype=torch.bfloat16, device="cpu")).T.to(dtype)

    def _product(self, parts: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        height, width = self.format.padded_shape
        inputs = rows.to(torch.bfloat16)
        if width > inputs.shape[1]:
            inputs = functional.pad(inputs, (0, width - inputs.shape[1]))
        tiles = parts["codes"] if self.is_converted else unfold(parts["codes"], self.format.bits)
        group = self.format.group_size
        if (repeats := _LEAST_GROUP // group) > 1:
            # Groups too small for torch's product stand there several times, and get inputs of zero all but once.
            tiles = tiles.view(len(tiles), -1, 1, group * TILE_ROWS // 2).expand(-1, -1, repeats, -1).reshape(-1)
            inputs = functional.pad(inputs.view(-1, width // group, group), (0, (repeats - 1) * group)).flatten(1)
            group, width = repeats * group, repeats * width
        product = torch._weight_int4pack_mm_for_cpu(
            # Scales of a layer that is joined with others are a view of theirs.
            inputs.contiguous(),
            tiles.view(height, width // 2),
            group,
            self.format.grids(parts).contiguous(),
        )
        return product if height == self.format.shape[0] else product[:, : self.format.shape[0]]


def takes_groups(stored: GroupedFormat) -> bool:
    """Returns whether this CPU's product takes groups of a size; smaller ones have to be arranged for it each time."""
    return stored.group_size >= _LEAST_GROUP or is_native_order()


@lru_cache(maxsize=1)
def is_native_order() -> bool:
    """Returns whether this CPU's product reads codes in the stored order."""
    generator = torch.Generator().manual_seed(0)
    # The default device may be another one, as in Lightning's `configure_model`.
    codes = torch.randint(16, (TILE_ROWS, 16), generator=generator, dtype=torch.int32, device="cpu")
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    return torch.equal(packed.flatten(), to_tiles(codes.to(torch.uint8)).flatten())
