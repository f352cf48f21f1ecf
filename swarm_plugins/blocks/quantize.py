"""Keeps the weights of blocks in few bits.

Activations, norms, routers, tiny layers, layers whose weight is read by the module around them, and caches stay as they
are; gradients flow to activations and adapters.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from swarm_plugins.errors import ConfigError
from swarm_plugins.moe import is_fused_experts
from swarm_plugins.moe.table import FEW_APART
from swarm_plugins.weights.experts import quantize_experts
from swarm_plugins.weights.linears import arranged, may_be_packed, packed
from swarm_plugins.weights.names import GEMV, HALVES, HOSTED_WIDTHS, QUANTIZATIONS


def check_quantization(kind: str) -> None:
    """Raises ConfigError if the name of a quantization is unknown."""
    if kind not in QUANTIZATIONS:
        raise ConfigError(f"unknown quantization {kind!r}; known: {', '.join(QUANTIZATIONS)}")


def quantize_block(block: nn.Module, kind: str, *, kernel: str | None = None) -> None:
    """Replaces the weights of a block's linear layers and fused experts; ``kernel``: as for `packed`."""
    bits = HOSTED_WIDTHS[kind]
    for parent, name, child in _frozen(block):
        if type(child) is nn.Linear:
            setattr(parent, name, packed(child, bits, kernel=kernel))
        else:
            quantize_experts(child, bits)


def arrange_block(block: nn.Module, kernel: str) -> None:
    """Arranges the weights of a block's linear layers, as wide as they are, for a kernel."""
    for parent, name, child in _frozen(block):
        if type(child) is nn.Linear:
            setattr(parent, name, arranged(child, kernel))
        elif kernel in (HALVES, GEMV):
            setattr(child, FEW_APART, True)


def _frozen(block: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yields what holds most of a block's weights, with its name and the module that it is in."""
    for path, parent in list(block.named_modules()):
        for name, child in list(parent.named_children()):
            is_linear = type(child) is nn.Linear and may_be_packed(f"{path}.{name}", child)
            if is_linear or is_fused_experts(child):
                yield parent, name, child
