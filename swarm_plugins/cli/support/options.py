"""Parses option values with a syntax of their own: ``fast=4GB,bits=4``, ``nf4``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.widths import EXPERT_BITS, OTHER_BITS, Width
from swarm_plugins.sizes import parse_bytes

T = TypeVar("T")

_PREFETCH: Mapping[str, bool] = {"on": True, "off": False}


def parse_offload(text: str) -> OffloadConfig:
    """Parses a config such as ``fast=4GB,ram=16GB,prefetch=off``; an empty text means the defaults.

    Raises:
        ConfigError: If a name is unknown or given twice, or a value cannot be read or is out of range.
    """
    fields: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _READERS:
            raise ConfigError(
                f"invalid --offload {part!r}: expected NAME=VALUE with a name out of {', '.join(_READERS)}, such as "
                "fast=4GB,ram=16GB,prefetch=off"
            )
        field, read = _READERS[name]
        if field in fields:
            raise ConfigError(f"--offload gives {name} twice: {text!r}; give it once")
        fields[field] = read(name, value)
    return OffloadConfig(**fields)


def format_offload(config: OffloadConfig) -> str:
    """Formats a config for `parse_offload`, with sizes rounded down to megabytes."""
    parts: list[str] = []
    for name, value in (("fast", config.fast_bytes), ("ram", config.ram_bytes)):
        if value is not None:
            parts.append(f"{name}={value // 10**6}MB" if value >= 10**6 else f"{name}={value}")
    for name, bits in (("bits", config.expert_bits), ("other-bits", config.other_bits)):
        if bits is not None:
            parts.append(f"{name}={bits}")
    if not config.prefetch:
        parts.append("prefetch=off")
    if config.num_readers != OffloadConfig().num_readers:
        parts.append(f"readers={config.num_readers}")
    return ",".join(parts)


def parse_width(option: str, text: str, allowed: Iterable[Width]) -> Width:
    """Parses an option's width, such as ``4`` or ``nf4``; raises ConfigError unless it is one of ``allowed``."""
    widths = _by_name(allowed)
    if text not in widths:
        raise ConfigError(f"invalid {option} {text!r}: expected {_one_of(widths)}")
    return widths[text]


def _one_of(names: Iterable[str]) -> str:
    """Lists choices: ``2, 4 or nf4``."""
    *most, last = names
    return f"{', '.join(most)} or {last}"


def _by_name(widths: Iterable[Width]) -> dict[str, Width]:
    return {str(width): width for width in widths}


def _size(name: str, value: str) -> int:
    try:
        return parse_bytes(value)
    except ConfigError as exc:
        raise ConfigError(f"invalid --offload {name}={value}: {exc}") from exc


def _whole(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 4):
        raise ConfigError(f"invalid --offload {name}={value}: expected a whole number of at most 4 digits")
    return int(value)


def _choice(choices: Mapping[str, T], name: str, value: str) -> T:
    if value not in choices:
        raise ConfigError(f"invalid --offload {name}={value}: expected {_one_of(choices)}")
    return choices[value]


_READERS: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    "fast": ("fast_bytes", _size),
    "ram": ("ram_bytes", _size),
    "bits": ("expert_bits", partial(_choice, _by_name(EXPERT_BITS))),
    "other-bits": ("other_bits", partial(_choice, _by_name(OTHER_BITS))),
    "prefetch": ("prefetch", partial(_choice, _PREFETCH)),
    "readers": ("num_readers", _whole),
}
