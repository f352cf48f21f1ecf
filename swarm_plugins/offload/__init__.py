"""Experts on SSD and in RAM, a bounded set in fast memory: for generation and for training, without any server."""

from __future__ import annotations

from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.load import load_offloaded
from swarm_plugins.offload.quantizing import QuantizedSize, quantize_checkpoint
from swarm_plugins.offload.stats import OffloadStats

__all__ = ["OffloadConfig", "OffloadStats", "QuantizedSize", "load_offloaded", "quantize_checkpoint"]
