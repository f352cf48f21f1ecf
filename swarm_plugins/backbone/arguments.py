"""What servers need of the arguments of a call of the decoder: positions and padding.

Servers run the family's own forward on them, and make masks, rotations and biases themselves. So what a model passes to
its layers does not matter, but for the cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from swarm_plugins.backbone.attention import PADDING
from swarm_plugins.errors import UnsupportedError

_KNOWN = frozenset({
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "cache_position",
    "logits_to_keep",
    # Meant for the loss; models pass all keyword arguments to their decoders, which ignore these.
    "num_items_in_batch",
    "shift_labels",
})  # fmt: skip
"""Tensors that a decoder may be called with."""


class Arguments(NamedTuple):
    """What a server needs."""

    position_ids: Tensor | None
    """``[B or 1, S]``."""
    attention_mask: Tensor | None
    """``[B, cached + S]``, bool. None: no padding."""


def by_name(module_class: type[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Names the positional arguments of a module's forward."""
    names = list(inspect.signature(module_class.forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def read_arguments(hidden: Tensor, decoder: Mapping[str, Any], cache: Cache | None) -> Arguments:
    """Returns what a server needs; raises UnsupportedError if servers cannot take an argument.

    Args:
        hidden: Hidden states of the new tokens.
        decoder: What the decoder was called with, by name.
        cache: Where the tokens before are.
    """
    unknown = [name for name, value in decoder.items() if name not in _KNOWN and isinstance(value, Tensor)]
    if unknown:
        raise UnsupportedError(
            f"remote blocks do not take the tensor argument(s) {', '.join(sorted(unknown))}; leave them out"
        )
    positions: Tensor | None = decoder.get("position_ids")
    positions = positions.cpu() if positions is not None else None
    mask = _padding(decoder.get("attention_mask"), hidden, positions, cache)
    return Arguments(position_ids=positions, attention_mask=mask)


def _padding(mask: Any, hidden: Tensor, positions: Tensor | None, cache: Cache | None) -> Tensor | None:
    """Returns the padding mask as bool, or None when nothing is padded."""
    if isinstance(mask, Mapping):  # one mask for each kind of layer, all of the same padding
        mask = next((one for one in mask.values() if one is not None), None)
    mask = getattr(mask, PADDING, mask)
    if mask is None:
        # Without mask and cache, transformers takes positions that start again for packed sequences. Servers see
        # neither an empty cache nor an all-true mask, so they get an explicit mask.
        is_empty = cache is not None and _length(cache) == 0
        return torch.ones(hidden.shape[:2], dtype=torch.bool) if is_empty and _restart(positions) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UnsupportedError(
            f"remote blocks take a padding mask of shape [batch, length], got {shape}; pass the tokenizer's "
            "attention_mask"
        )
    mask = mask.bool().cpu()
    return None if bool(mask.all()) and not _restart(positions) else mask


def _length(cache: Cache) -> int:
    """Returns the tokens of a cache; transformers refuses to tell where no layer has attention."""
    counting = (layer for layer in cache.layers if isinstance(layer, CacheLayerMixin))
    return int(next((layer.get_seq_length() for layer in counting), 0))


def _restart(positions: Tensor | None) -> bool:
    """Returns whether positions start again within a row."""
    return positions is not None and bool((positions[..., 1:] - positions[..., :-1] != 1).any())
