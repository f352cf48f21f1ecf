"""The widths that weights can be kept in, and their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from swarm_plugins.errors import ConfigError

Nested: TypeAlias = Literal["2dq", "3dq", "4dq"]
"""Bits of codes whose scales are quantized as well (double quantization)."""
Width: TypeAlias = int | Literal["nf4"] | Nested
"""A number of bits, or the name of a format."""

NF4: Literal["nf4"] = "nf4"
"""4 bits whose levels are quantiles of the normal distribution (Dettmers et al. 2023, section 3)."""
WIDTHS: tuple[Width, ...] = (2, 3, 4, 8, 16, NF4, "2dq", "3dq", "4dq")
"""Widths of weights."""
QUANT_METHOD = "swarm_plugins"
"""``quant_method`` in the config of a quantized store, which tells other readers whose format it is."""
GROUP_SIZES: Mapping[Width, int] = {4: 64, 3: 64, 2: 32, NF4: 64, "4dq": 64, "3dq": 64, "2dq": 16}
"""Columns that share a scale, by width; 8 bits have one per row.

Four levels need closer grids. Nested widths have the groups of Eliseev and Mazur (2023).
"""


class ScaleCodes(NamedTuple):
    """How scales are quantized themselves."""

    bits: int
    """Of a scale, and of a zero point."""
    block: int
    """Groups that share a second scale."""


SCALE_CODES: Mapping[Width, ScaleCodes] = {
    "4dq": ScaleCodes(8, 256),
    "3dq": ScaleCodes(8, 128),
    "2dq": ScaleCodes(4, 128),
}
"""Nested widths; others keep their scales as floating numbers."""
_NUMBER_BITS = 16
"""Of a floating scale or offset in groups that have both."""


def check_width(name: str, width: object, remark: str = "") -> None:
    """Checks that a width is known; name and remark are for the message.

    Raises:
        ConfigError: If it is not.
    """
    # Equality is not enough: 4.0 would reach code that expects an integer.
    if type(width) not in (int, str) or width not in WIDTHS:
        raise ConfigError(f"{name} is {width!r}; expected one of {', '.join(map(str, WIDTHS))}{remark}")


def num_bits(width: Width) -> int:
    """Returns the number of bits of a weight's code."""
    if width == NF4:
        return 4
    return width if isinstance(width, int) else int(width[0])


def stored_bits(width: Width) -> float:
    """Returns the bits that a weight takes with its share of the scales; those of whole rows do not count."""
    bits, group = num_bits(width), GROUP_SIZES.get(width)
    if group is None:
        return bits
    if width not in SCALE_CODES:
        return bits + 2 * _NUMBER_BITS / group
    codes = SCALE_CODES[width]
    return bits + 2 * (codes.bits + 2 * _NUMBER_BITS / codes.block) / group


def width_text(width: Width) -> str:
    """Returns a width in words: ``4 bits`` or ``nf4``."""
    return width if isinstance(width, str) else f"{width} bits"
