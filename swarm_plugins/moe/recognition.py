"""Which modules are fused experts in the sense of transformers' experts registry."""

from __future__ import annotations

from torch import nn

__all__ = ["EXPERT_PARAMETERS", "is_fused_experts"]

EXPERT_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
"""Weights that fused experts have; with biases, also these names with ``_bias``."""


def is_fused_experts(module: nn.Module) -> bool:
    """Says whether a module runs experts from fused parameters through transformers' registry."""
    return all(
        hasattr(module, name) for name in ("has_gate", "is_transposed", "has_bias", "_apply_gate", "num_experts")
    )
