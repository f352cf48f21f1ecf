"""Codes of 8 bits, each a number of its own, with a scale for each block, row or the whole weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_plugins.weights.stored import Part, PublishedFormat, check_scales

# Of e4m3 without its sign.
_NAN = 0x7F


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
    has_scales_as_bytes: bool = False
    """Whether the file stores e8m0 scales as uint8."""

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

    @property
    def file_parts(self) -> tuple[Part, ...]:
        codes, scales = self.parts
        return codes, scales._replace(dtype=torch.uint8) if self.has_scales_as_bytes else scales

    def checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        tensors = {**tensors, "scales": tensors["scales"].view(self.scales_dtype)}
        # A row of zeros has the maximum zero.
        check_scales(tensors, "scales", may_be_zero=self.unit != 1.0)
        if self.codes_dtype == torch.float8_e4m3fn and bool(((tensors["codes"].view(torch.int8) & _NAN) == _NAN).any()):
            raise ValueError("its codes hold NaN")
        return super().checked(tensors)

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        scales = parts["scales"].float().view(self.grid)
        wide, unit = _widened(parts["codes"])
        (rows, columns), (height, width) = self.shape, self.block
        if rows % height == 0 and columns % width == 0:
            blocks = wide.view(rows // height, height, columns // width, width)
            blocks.mul_((scales * unit)[:, None, :, None])
        else:
            for dim, size in enumerate(self.block):
                if scales.shape[dim] > 1 and size > 1:
                    scales = scales.repeat_interleave(size, dim).narrow(dim, 0, self.shape[dim])
            wide.mul_(scales * unit)
        return (wide if self.unit == 1.0 else wide.mul_(self.unit)).to(dtype)


def _widened(codes: Tensor) -> tuple[Tensor, float]:
    """Returns codes as float32, to be multiplied by a number as well.

    torch casts float8 one by one on a CPU: 8.5 ns each, where the shift takes 0.7. Exponent and mantissa of e4m3 are
    the upper bits of float16's, whose exponents begin at 2**-8 of e4m3's; its NaN would be 480.
    """
    if codes.dtype != torch.float8_e4m3fn or codes.device.type != "cpu":
        return codes.float(), 1.0
    halves = codes.view(torch.int8).to(torch.int16) << 7  # the sign twice, in bits 14 and 15
    return halves.bitwise_and_(~(1 << 14)).view(torch.float16).float(), 256.0
