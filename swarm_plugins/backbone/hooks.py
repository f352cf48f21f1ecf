"""Users' hooks on remote layers: which outputs they need, and whether they have changed one in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing


def seen_by_hooks(blocks: Sequence[int], layers: Sequence[nn.Module]) -> frozenset[int]:
    """Returns the blocks, except the last, whose outputs users' hooks see.

    Args:
        blocks: That run as one chain, in the order in which the model calls them.
        layers: Theirs.
    """
    return frozenset(
        block
        for block, (layer, following) in zip(blocks, pairwise(layers), strict=False)
        if _has_users(layer._forward_hooks) or _has_users(following._forward_pre_hooks)
    )


def outputs_wanted(collector: Mapping[str, Any], seen: frozenset[int], *, wants_hidden: bool) -> frozenset[int] | None:
    """Returns the blocks whose outputs transformers collects or hooks see; None: all.

    transformers counts hidden states from the embeddings: the first one is the input of block 0.
    """
    selected = collector.get("_hidden_states_layers") if wants_hidden else ()
    return None if selected is None else seen.union(index - 1 for index in selected)


def _has_users(hooks: Mapping[int, Any]) -> bool:
    # The hooks by which transformers collects hidden states stay once they were wanted.
    own = output_capturing.__name__
    return bool(hooks) and any(getattr(hook, "__module__", None) != own for hook in hooks.values())


def counted(tensor: Tensor) -> Tensor:
    """Returns a tensor that counts changes in place: itself, or a copy if it was made in inference mode."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def num_changes(tensor: Tensor) -> int | None:
    """Returns how often a tensor was changed in place; None if it does not count, see `counted`."""
    return None if tensor.is_inference() else tensor._version
