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

from swarm_plugins.backbone.attention import PADDING, SEEN, Seen
from swarm_plugins.block_io import have_jumps
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.layer_masks import LayerMasks, packed

_KNOWN = frozenset({
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "cache_position",
    "logits_to_keep",
    # Decoders add what belongs to the types to their embeddings, or make masks of them.
    "token_type_ids",
    # Meant for towers, or for the loss; models pass all keyword arguments to their decoders, which ignore these.
    "image_sizes",
    "labels",
    "num_items_in_batch",
    "shift_labels",
})  # fmt: skip
"""Tensors that a decoder may be called with."""


class Arguments(NamedTuple):
    """What a server needs."""

    position_ids: Tensor | None
    """``[B or 1, S]`` or ``[3 or 4, B or 1, S]``."""
    attention_mask: Tensor | None
    """``[B, cached + S]``, bool. None: no padding."""
    layer_masks: LayerMasks | None
    """What new tokens see, if some see later ones."""


def by_name(module_class: type[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Names the positional arguments of a module's forward."""
    names = list(inspect.signature(module_class.forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def read_arguments(
    hidden: Tensor, decoder: Mapping[str, Any], cache: Cache | None, *, has_side_inputs: bool = False
) -> Arguments:
    """Returns what a server needs; raises UnsupportedError if servers cannot take an argument.

    Args:
        hidden: Hidden states of the new tokens.
        decoder: What the decoder was called with, by name.
        cache: Where the tokens before are.
        has_side_inputs: Whether the decoder makes inputs of layers here, perhaps of numbers that it is given by token.
    """
    unknown = [
        name
        for name, value in decoder.items()
        if name not in _KNOWN
        and isinstance(value, Tensor)
        and not (has_side_inputs and value.is_floating_point() and value.shape[:2] == hidden.shape[:2])
    ]
    if unknown:
        raise UnsupportedError(
            f"remote blocks do not take the tensor argument(s) {', '.join(sorted(unknown))}; leave them out"
        )
    positions: Tensor | None = decoder.get("position_ids")
    positions = positions.cpu() if positions is not None else None
    if positions is not None and positions.ndim == 3 and bool((positions == positions[:1]).all()):
        positions = positions[0]  # no images: decoders make the planes of one themselves
    mask = decoder.get("attention_mask")
    padding = _padding(mask, hidden, positions, cache)
    return Arguments(position_ids=positions, attention_mask=padding, layer_masks=_layer_masks(mask))


def read_ids(decoder: Mapping[str, Any]) -> Tensor:
    """Returns the ids of the new tokens, ``[B, S]``, that layers take; raises UnsupportedError if there are none."""
    ids = decoder.get("input_ids")
    if not isinstance(ids, Tensor):
        raise UnsupportedError(
            "layers of this model take the ids of tokens: call it with input_ids, without soft prompts or inputs_embeds"
        )
    return ids.cpu()


def _layer_masks(mask: Any) -> LayerMasks | None:
    """Returns what new tokens see, if some of them see later ones: then servers cannot know."""
    masks = mask if isinstance(mask, Mapping) else {"": mask}
    known: dict[str, Seen | None] = {kind: getattr(one, SEEN, None) for kind, one in masks.items()}
    if not any(one is not None and one.is_changed for one in known.values()):
        return None
    seen = {kind: one.make().cpu() for kind, one in known.items() if one is not None}
    if not any(map(_sees_ahead, seen.values())):
        return None
    unknown = sorted(known.keys() - seen.keys())
    if unknown:
        raise UnsupportedError(
            f"tokens of an image see each other, which remote blocks of kind {', '.join(unknown)} cannot be told; use "
            "a model of another family for images"
        )
    return packed(list(seen), list(seen.values()))


def _sees_ahead(seen: Tensor) -> bool:
    """Returns whether a token sees one after it, given ``[B, S, L]``."""
    num_new, length = seen.shape[1:]
    return bool(seen.triu(length - num_new + 1).any())


def _padding(mask: Any, hidden: Tensor, positions: Tensor | None, cache: Cache | None) -> Tensor | None:
    """Returns the padding mask as bool, or None when nothing is padded."""
    if isinstance(mask, Mapping):  # one mask for each kind of layer, all of the same padding
        mask = next((one for one in mask.values() if one is not None), None)
    mask = getattr(mask, PADDING, mask)
    if mask is None:
        # Without mask and cache, transformers takes positions that start again for packed sequences. Servers see
        # neither an empty cache nor an all-true mask, so they get an explicit mask.
        is_empty = cache is not None and _length(cache) == 0
        return torch.ones(hidden.shape[:2], dtype=torch.bool) if is_empty and have_jumps(positions) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise UnsupportedError(
            f"remote blocks take a padding mask of shape [batch, length], got {shape}; pass the tokenizer's "
            "attention_mask"
        )
    mask = mask.bool().cpu()
    return None if bool(mask.all()) and not have_jumps(positions) else mask


def _length(cache: Cache) -> int:
    """Returns the tokens of a cache; transformers refuses to tell where no layer has attention."""
    counting = (layer for layer in cache.layers if isinstance(layer, CacheLayerMixin))
    return int(next((layer.get_seq_length() for layer in counting), 0))
