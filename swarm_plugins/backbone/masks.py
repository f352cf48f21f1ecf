"""The attention ``swarm``: blocks get the plain padding mask, servers build the mask their family needs."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

__all__ = ["ATTENTION_NAME", "register_attention"]

ATTENTION_NAME = "swarm"


def _padding_mask(*, attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
    """Returns the two-dimensional mask ``[B, cached + new]`` unchanged."""
    return attention_mask


def register_attention() -> None:
    """Registers the name with transformers.

    Both registries need it: a name without a mask function makes transformers drop the padding mask silently. The
    attention function itself never runs on a remote block.
    """
    AttentionInterface.register(ATTENTION_NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, _padding_mask)
