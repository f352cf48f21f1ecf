"""``fast=4GB,ram=16GB,bits=4``: offloading in one word of a command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from swarm_plugins.cli.support.widths import parse_width
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.widths import EXPERT_BITS, OTHER_BITS, Width
from swarm_plugins.sizes import parse_bytes

__all__ = ["OFFLOAD_HELP", "format_offload", "parse_offload"]

OFFLOAD_HELP = (
    "Where experts are kept: fast=SIZE,ram=SIZE,bits=8|4|3|2|nf4,other-bits=8|4|nf4,prefetch=auto|on|off,pinned=SHARE,"
    "readers=N, each optional. `swarm plan` says what to give."
)
_PREFETCH: Mapping[str, bool | str] = {"on": True, "off": False, "auto": "auto"}


def parse_offload(text: str) -> OffloadConfig:
    """Returns the config that ``fast=4GB,ram=16GB,prefetch=off`` means; an empty text means the defaults.

    Raises:
        ConfigError: If a name is unknown or twice there, or a value cannot be read or is out of range.
    """
    fields: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _READERS:
            raise ConfigError(
                f"--offload has {part!r}; known are {', '.join(_READERS)}, as in fast=4GB,ram=16GB,prefetch=off"
            )
        field, read = _READERS[name]
        if field in fields:
            raise ConfigError(f"--offload gives {name} twice: {text!r}; give it once")
        fields[field] = read(name, value)
    return OffloadConfig(**fields)


def format_offload(config: OffloadConfig) -> str:
    """Returns the text that `parse_offload` reads as the same config; sizes are rounded down to megabytes."""
    parts: list[str] = []
    for name, value in (("fast", config.fast_bytes), ("ram", config.ram_bytes)):
        if value is not None:
            parts.append(f"{name}={value // 10**6}MB" if value >= 10**6 else f"{name}={value}")
    for name, bits in (("bits", config.expert_bits), ("other-bits", config.other_bits)):
        if bits is not None:
            parts.append(f"{name}={bits}")
    if config.prefetch != "auto":
        parts.append(f"prefetch={'on' if config.prefetch else 'off'}")
    if config.pinned_share:
        parts.append(f"pinned={config.pinned_share:g}")
    if config.num_readers != OffloadConfig().num_readers:
        parts.append(f"readers={config.num_readers}")
    return ",".join(parts)


def _size(name: str, value: str) -> int:
    try:
        return parse_bytes(value)
    except ConfigError as exc:
        raise ConfigError(f"--offload {name}={value}: {exc}") from exc


def _whole(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 4):
        raise ConfigError(f"--offload {name}={value} is no whole number")
    return int(value)


def _width(allowed: tuple[Width, ...], name: str, value: str) -> Width:
    return parse_width(f"--offload {name}", value, allowed)


def _share(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as exc:
        raise ConfigError(f"--offload {name}={value} is no number; allowed are 0 up to (not including) 1") from exc


def _prefetch(name: str, value: str) -> bool | str:
    if value not in _PREFETCH:
        raise ConfigError(f"--offload {name}={value}; allowed are {', '.join(_PREFETCH)}")
    return _PREFETCH[value]


_READERS: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    "fast": ("fast_bytes", _size),
    "ram": ("ram_bytes", _size),
    "bits": ("expert_bits", partial(_width, EXPERT_BITS)),
    "other-bits": ("other_bits", partial(_width, OTHER_BITS)),
    "prefetch": ("prefetch", _prefetch),
    "pinned": ("pinned_share", _share),
    "readers": ("num_readers", _whole),
}
