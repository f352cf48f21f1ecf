"""Reads settings of offloading as text: ``fast=4GB,bits=4``, ``nf4``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from swarm_plugins.errors import ConfigError
from swarm_plugins.offload.config import POLICIES, OffloadConfig
from swarm_plugins.sizes import parse_bytes
from swarm_plugins.weights.widths import WIDTHS, Width

_WIDTHS: Mapping[str, Width] = {str(width): width for width in WIDTHS}
_FIELDS = {
    "fast": "fast_bytes",
    "ram": "ram_bytes",
    "bits": "expert_bits",
    "other-bits": "other_bits",
    "prefetch": "prefetch",
    "policy": "policy",
    "readers": "num_readers",
}
"""Fields of `OffloadConfig` by their names in ``--offload``."""
_CHOICES: Mapping[str, Mapping[str, Any]] = {
    "bits": _WIDTHS,
    "other-bits": _WIDTHS,
    "prefetch": {"on": True, "off": False},
    "policy": {policy: policy for policy in POLICIES},
}
OFFLOAD_WORDS = {field: f"--offload {name}" for name, field in _FIELDS.items() if name != field}
"""Options by the config fields that the library's messages name; users have typed options."""


def _form(name: str) -> str:
    if _CHOICES.get(name) is _WIDTHS:
        return "WIDTH"
    if name in _CHOICES:
        return "|".join(_CHOICES[name])
    return "SIZE" if _is_size(name) else "N"


def _is_size(name: str) -> bool:
    return _FIELDS[name].endswith("_bytes")


def parse_offload(text: str, option: str = "--offload") -> OffloadConfig:
    """Parses a config such as ``fast=4GB,ram=16GB,prefetch=off``; an empty text means the defaults.

    ``option`` is where the text stands, for messages.

    Raises:
        ConfigError: If a name is unknown or given twice, or a value cannot be read or is out of range.
    """
    fields: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _FIELDS:
            raise ConfigError(
                f"invalid {option} {part!r}: expected NAME=VALUE with a name out of {', '.join(_FIELDS)}, such as "
                "fast=4GB,ram=16GB,prefetch=off"
            )
        if _FIELDS[name] in fields:
            raise ConfigError(f"{option} gives {name} twice: {text!r}; give it once")
        fields[_FIELDS[name]] = _read(name, value, option)
    return OffloadConfig(**fields)


def _read(name: str, value: str, option: str) -> Any:
    invalid = f"invalid {option} {name}={value}"
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise ConfigError(f"{invalid}: expected {_one_of(_CHOICES[name])}")
        return _CHOICES[name][value]
    if _is_size(name):
        try:
            return parse_bytes(value)
        except ConfigError as exc:
            raise ConfigError(f"{invalid}: {exc}") from exc
    if not (value.isascii() and value.isdigit() and len(value) <= 4):
        raise ConfigError(f"{invalid}: expected a whole number of at most 4 digits")
    return int(value)


def format_offload(config: OffloadConfig) -> str:
    """Formats a config for `parse_offload`, with sizes rounded down to megabytes."""
    values = {name: getattr(config, field) for name, field in _FIELDS.items()}
    default = OffloadConfig()
    return ",".join(
        f"{name}={_written(name, value)}" for name, value in values.items() if value != getattr(default, _FIELDS[name])
    )


def _written(name: str, value: Any) -> str:
    if _is_size(name) and value >= 10**6:
        return f"{value // 10**6}MB"
    return next((choice for choice, chosen in _CHOICES.get(name, {}).items() if chosen == value), str(value))


def parse_width(option: str, text: str) -> Width:
    """Parses an option's width, such as ``4`` or ``nf4``; raises ConfigError if it is unknown."""
    if text not in _WIDTHS:
        raise ConfigError(f"invalid {option} {text!r}: expected {_one_of(_WIDTHS)}")
    return _WIDTHS[text]


def _one_of(names: Iterable[str]) -> str:
    """Lists choices: ``2, 4 or nf4``."""
    *most, last = names
    return f"{', '.join(most)} or {last}"


OFFLOAD_HELP = f"{', '.join(f'{name}={_form(name)}' for name in _FIELDS)}, each optional. WIDTH is {_one_of(_WIDTHS)}."
"""What ``--offload`` takes."""
