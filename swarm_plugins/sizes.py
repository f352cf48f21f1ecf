"""Parses and formats sizes in bytes."""

from __future__ import annotations

import re

from swarm_plugins.errors import ConfigError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}": 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Returns the number of bytes of ``512MB``, ``1.5GiB`` or ``1000000``.

    Raises:
        ConfigError: If the text is not a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(
            f"invalid size {text!r}: expected a number of up to 18 digits, "
            "or one with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_bytes(num_bytes: float) -> str:
    """Returns a human-readable size: ``512 MB``."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(num_bytes) < 999.5:  # three digits of more would be 1e+03
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def size_of(num_bytes: int) -> str:
    """Returns a size to type that is no smaller: ``816MB``."""
    return f"{-(-num_bytes // 1000**2)}MB"
