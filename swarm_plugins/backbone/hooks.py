"""Hooks of the user's on remote layers: which outputs they see, and whether they have changed one in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing


def seen_by_hooks(blocks: Sequence[int], layers: Sequence[nn.Module]) -> frozenset[int]:
    """Returns the blocks, except the last, whose outputs hooks of the user's see.

    Args:
        blocks: That run as one chain, in the order in which the model calls them.
        layers: Theirs.
    """
    return frozenset(
        block
        for block, (layer, following) in zip(blocks, pairwise(layers), strict=False)
        if _has_users(layer._forward_hooks) or _has_users(following._forward_pre_hooks)
    )


def _has_users(hooks: Mapping[int, Any]) -> bool:
    # Once hidden states were wanted, the hooks of transformers that collect them stay.
    own = output_capturing.__name__
    return bool(hooks) and any(getattr(hook, "__module__", None) != own for hook in hooks.values())


def counted(tensor: Tensor) -> Tensor:
    """Returns a tensor that counts its changes in place: itself, or a copy of one that inference mode has made."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def num_changes(tensor: Tensor) -> int | None:
    """Returns how often a tensor was changed in place; None if it does not count, see `counted`."""
    return None if tensor.is_inference() else tensor._version
