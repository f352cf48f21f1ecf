"""Keeps the weights of blocks in few bits.

Activations, norms, routers of one output and caches stay as they are; gradients flow to activations and adapters.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from swarm_plugins.errors import ConfigError
from swarm_plugins.moe import is_fused_experts
from swarm_plugins.weights.experts import quantize_experts
from swarm_plugins.weights.linears import is_large_enough, packed
from swarm_plugins.weights.widths import NF4, Width

_WIDTHS: Mapping[str, Width] = {"int8": 8, "nf4": NF4}
QUANTIZATIONS = ("none", *_WIDTHS)
"""Known ways to keep weights."""


def check_quantization(kind: str) -> None:
    """Raises ConfigError if the name of a quantization is unknown."""
    if kind not in QUANTIZATIONS:
        raise ConfigError(f"unknown quantization {kind!r}; known: {', '.join(QUANTIZATIONS)}")


def quantize_block(block: nn.Module, kind: str) -> None:
    """Replaces the weights of a block's linear layers and fused experts."""
    bits = _WIDTHS[kind]
    for parent in list(block.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and is_large_enough(child):
                setattr(parent, name, packed(child, bits))
            elif is_fused_experts(child):
                quantize_experts(child, bits)
