"""Groups of weights whose scales are quantized a second time (Dettmers et al. 2023, section 3).

The lowest level of a group is ``zero * scale``. Scales and zero points, ``[groups * rows]`` each, become codes in
blocks: a number is ``step * code + least`` of its block, both bfloat16. What remains is a weight in groups, rounded for
the scales and offsets that these codes stand for. With them a weight takes 4.25, 3.26 or 2.53 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_plugins.weights.formats.groups import CODE_OF_OFFSET, GroupedFormat
from swarm_plugins.weights.stored import Part
from swarm_plugins.weights.widths import GROUP_SIZES, SCALE_CODES, Nested, num_bits


@dataclass(frozen=True)
class NestedFormat(GroupedFormat):
    """A weight as codes of few bits, with codes for the scale and the zero point of each group of columns."""

    width: Nested

    @classmethod
    def of(cls, shape: tuple[int, int], width: Nested) -> NestedFormat:
        return cls(shape, num_bits(width), width)

    @property
    def group_size(self) -> int:
        return GROUP_SIZES[self.width]

    @property
    def grid_parts(self) -> tuple[Part, ...]:
        """Codes of scales and of zero points, in the halves of a byte if they have 4 bits; step and least of blocks."""
        bits, block = SCALE_CODES[self.width]
        return (
            Part("groups", torch.uint8, (bits // 4, self._num_blocks, block)),
            Part("scales", torch.bfloat16, (2, self._num_blocks, 2)),
        )

    def keep(self, scale: Tensor, low: Tensor) -> dict[str, Tensor]:
        # Far from zero a grid is as wide as zero points reach: a group of equal weights has no width of its own.
        scale = torch.maximum(scale, low.abs() / (2 << self.bits))
        # Of a group of zeros any zero point will do: one that is not far from its neighbors'.
        zero = torch.where(scale == 0, (1 - (1 << self.bits)) / 2, low / scale)
        numbers = self._blocks(torch.stack([scale, zero]))
        least, most = numbers.amin(-1), numbers.amax(-1)
        levels = (1 << SCALE_CODES[self.width].bits) - 1
        scales = torch.stack([(most - least) / levels, least], dim=2).to(torch.bfloat16)
        step, least = scales.float().split(1, dim=2)
        codes = ((numbers - least) / torch.where(step == 0, torch.inf, step)).round_().clamp_(0, levels).to(torch.uint8)
        if SCALE_CODES[self.width].bits == 4:
            codes = (codes[0] | (codes[1] << 4)).unsqueeze(0)
        return {"groups": codes, "scales": scales}

    def grids(self, parts: Mapping[str, Tensor]) -> Tensor:
        codes = parts["groups"]
        if SCALE_CODES[self.width].bits == 4:
            codes = torch.cat([codes & 0x0F, codes >> 4])
        step, least = parts["scales"].float().split(1, dim=2)  # [2, blocks, 1]
        groups, rows, _ = self.grids_shape
        scale, zero = codes.float().mul_(step).add_(least).flatten(1)[:, : groups * rows]
        # A quarter of the time that stacking them takes.
        grids: Tensor = scale.new_empty(groups * rows, 2, dtype=torch.bfloat16)
        grids[:, 0], grids[:, 1] = scale, (zero + CODE_OF_OFFSET).mul_(scale)
        return grids.view(groups, rows, 2)

    @property
    def _num_blocks(self) -> int:
        groups, rows, _ = self.grids_shape
        return -(-groups * rows // SCALE_CODES[self.width].block)

    def _blocks(self, numbers: Tensor) -> Tensor:
        """Returns numbers ``[2, groups, rows]`` in blocks ``[2, blocks, block]``, the last filled with its last one."""
        flat, size = numbers.flatten(1), self._num_blocks * SCALE_CODES[self.width].block
        return torch.cat([flat, flat[:, -1:].expand(-1, size - flat.shape[1])], dim=1).view(2, self._num_blocks, -1)
