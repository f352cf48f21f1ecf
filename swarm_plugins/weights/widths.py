"""The widths that weights can be kept in, and their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from swarm_plugins.errors import ConfigError

Width: TypeAlias = int | Literal["nf4"]
"""A number of bits, or the name of a foreign format."""

NF4: Literal["nf4"] = "nf4"
"""4 bits whose levels are quantiles of the normal distribution (Dettmers et al. 2023, section 3)."""
EXPERT_BITS: tuple[Width, ...] = (2, 3, 4, 8, 16, NF4)
"""Widths of experts."""
OTHER_BITS: tuple[Width, ...] = (4, 8, 16, NF4)
"""Widths of all other weights."""
GROUP_SIZES: Mapping[Width, int] = {4: 64, 3: 64, 2: 32, NF4: 64}
"""Columns that share a scale, by width; 8 bits have one per row.

Four levels need closer grids, and torch's 4-bit product on the CPU takes no fewer columns than 32.
"""


def check_width(name: str, width: object, allowed: tuple[Width, ...], remark: str = "") -> None:
    """Checks that a width is allowed; name and remark are for the message.

    Raises:
        ConfigError: If it is not.
    """
    # Equality is not enough: 4.0 would reach code that expects an integer.
    if type(width) not in (int, str) or width not in allowed:
        raise ConfigError(f"{name} is {width!r}; expected one of {', '.join(map(str, allowed))}{remark}")


def num_bits(width: Width) -> int:
    """Returns the number of bits of a weight's code."""
    return 4 if width == NF4 else width


def width_text(width: Width) -> str:
    """Returns a width in words: ``4 bits`` or ``nf4``."""
    return NF4 if width == NF4 else f"{width} bits"
