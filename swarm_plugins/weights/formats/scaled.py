"""Codes of 8 bits, each a number of its own, with a scale for each block, row or the whole weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_plugins.weights.stored import Part, PublishedFormat, check_scales


@dataclass(frozen=True)
class ScaledFormat(PublishedFormat):
    """A weight as codes of float8 or int8, each to be multiplied by the scale of its block.

    Blocks of ``fp8`` checkpoints are 128 x 128 (DeepSeek-V3 report, section 3.3.2); those of a scale per row are
    ``(1, columns)``, of a scale per weight ``(rows, columns)``. The last blocks may be cut.
    """

    shape: tuple[int, int]
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    codes_dtype: torch.dtype
    scales_dtype: torch.dtype
    scales_shape: tuple[int, ...]
    """As the file has it: the grid of blocks, whose ones may be left out."""
    unit: float = 1.0
    """Multiplies each product of code and scale; 1 / 127 where scales are maxima of rows."""

    def __post_init__(self) -> None:
        if min(self.block) < 1:
            raise ValueError(f"its blocks have the shape {list(self.block)}, which holds nothing")
        if math.prod(self.scales_shape) != math.prod(self.grid):
            raise ValueError(
                f"its scales have the shape {list(self.scales_shape)}, blocks of {list(self.block)} in a weight of "
                f"{list(self.shape)} need {list(self.grid)}"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks down and across."""
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])

    @property
    def parts(self) -> tuple[Part, ...]:
        return (
            Part("codes", self.codes_dtype, self.shape),
            Part("scales", self.scales_dtype, self.scales_shape),
        )

    def checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # A row of zeros has the maximum zero.
        check_scales(tensors, "scales", may_be_zero=self.unit != 1.0)
        return super().checked(tensors)

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        scales = parts["scales"].float().view(self.grid)
        for dim, size in enumerate(self.block):
            if scales.shape[dim] > 1 and size > 1:
                scales = scales.repeat_interleave(size, dim).narrow(dim, 0, self.shape[dim])
        wide = parts["codes"].float() * scales
        return (wide if self.unit == 1.0 else wide * self.unit).to(dtype)
