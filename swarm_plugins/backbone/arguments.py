"""Reduces the arguments of a decoder layer to what servers need: positions, padding and the cache."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from swarm_plugins.backbone.attention import PADDING
from swarm_plugins.errors import UnsupportedError

_KNOWN = frozenset({"attention_mask", "position_ids", "position_embeddings", "cache_position"}) | frozenset({
    # Meant for the loss; models pass all keyword arguments to their layers, which ignore these.
    "num_items_in_batch",
    "shift_labels",
})  # fmt: skip
"""Tensors that transformers passes to every decoder layer; servers compute position embeddings themselves."""


class LayerArguments(NamedTuple):
    """Arguments of a decoder layer that a server needs."""

    position_ids: Tensor | None
    """``[B or 1, S]``."""
    attention_mask: Tensor | None
    """``[B, cached + S]``, bool. None: no padding."""
    cache: Cache | None


def by_name(layer_class: type[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Names the positional arguments (after the hidden states) of a layer's forward."""
    names = list(inspect.signature(layer_class.forward).parameters)[2:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def read_arguments(hidden: Tensor, kwargs: Mapping[str, Any]) -> LayerArguments:
    """Returns the arguments a server needs; raises UnsupportedError if servers cannot take one."""
    # Not by name: some families call it `layer_past`, and without it every token would be the first.
    cache = next((value for value in kwargs.values() if isinstance(value, Cache)), None)
    positions: Tensor | None = kwargs.get("position_ids")
    positions = positions.cpu() if positions is not None else None
    unknown = [name for name, value in kwargs.items() if name not in _KNOWN and isinstance(value, Tensor)]
    if unknown:
        raise UnsupportedError(
            f"remote blocks do not take the tensor argument(s) {', '.join(sorted(unknown))}; leave them out"
        )
    mask = _padding(kwargs.get("attention_mask"), hidden, positions, cache)
    return LayerArguments(position_ids=positions, attention_mask=mask, cache=cache)


def _padding(mask: Any, hidden: Tensor, positions: Tensor | None, cache: Cache | None) -> Tensor | None:
    """Returns the padding mask as bool, or None when nothing is padded."""
    mask = getattr(mask, PADDING, mask)
    if mask is None:
        # Without mask and cache, transformers takes positions that start again for packed sequences. Servers see
        # neither an empty cache nor an all-true mask, so they get an explicit mask.
        is_empty = cache is not None and cache.get_seq_length() == 0
        return torch.ones(hidden.shape[:2], dtype=torch.bool) if is_empty and _restart(positions) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UnsupportedError(
            f"remote blocks take a padding mask of shape [batch, length], got {shape}; pass the tokenizer's "
            "attention_mask"
        )
    mask = mask.bool().cpu()
    return None if bool(mask.all()) and not _restart(positions) else mask


def _restart(positions: Tensor | None) -> bool:
    """Returns whether positions start again within a row."""
    return positions is not None and bool((positions[..., 1:] - positions[..., :-1] != 1).any())
