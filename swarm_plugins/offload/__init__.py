"""Experts on SSD and in RAM, a bounded set in fast memory: for generation and for training, without servers.

Settings are checked without torch: names are resolved at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_plugins.lazy import LazyNames

if TYPE_CHECKING:
    from swarm_plugins.offload.config import OffloadConfig
    from swarm_plugins.offload.load import load_offloaded
    from swarm_plugins.offload.quantizing import QuantizedSize, quantize_checkpoint
    from swarm_plugins.offload.stats import OffloadStats

__all__ = ["OffloadConfig", "OffloadStats", "QuantizedSize", "load_offloaded", "quantize_checkpoint"]

_NAMES = LazyNames(
    __name__,
    {
        "OffloadConfig": ".config",
        "OffloadStats": ".stats",
        "QuantizedSize": ".quantizing",
        "load_offloaded": ".load",
        "quantize_checkpoint": ".quantizing",
    },
)
__getattr__, __dir__ = _NAMES.get, _NAMES.list
