"""Experts on SSD and in RAM, a bounded set in fast memory: for generation and for training, without servers.

Settings are checked without torch: names are resolved at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm_plugins.offload.config import OffloadConfig
    from swarm_plugins.offload.load import load_offloaded
    from swarm_plugins.offload.quantizing import QuantizedSize, quantize_checkpoint
    from swarm_plugins.offload.stats import OffloadStats

__all__ = ["OffloadConfig", "OffloadStats", "QuantizedSize", "load_offloaded", "quantize_checkpoint"]

_HOMES = {
    "OffloadConfig": "config",
    "OffloadStats": "stats",
    "QuantizedSize": "quantizing",
    "load_offloaded": "load",
    "quantize_checkpoint": "quantizing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
