"""Sizes as people write them."""

from __future__ import annotations

import re

from swarm_plugins.errors import ConfigError

__all__ = ["format_bytes", "parse_bytes"]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}": 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Returns the bytes that ``512MB``, ``1.5GiB`` or ``1000000`` mean.

    Raises:
        ConfigError: If it is no size.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"{text!r} is no size: a number with or without B, KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_bytes(num_bytes: float) -> str:
    """Returns a size to read: ``512 MB``."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
