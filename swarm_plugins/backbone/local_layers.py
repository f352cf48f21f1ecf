"""Layers of a cache that stay here: which have states besides keys and values, and whether they can go back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from swarm_plugins.errors import UnsupportedError

_COMMON_LAYERS = (Cache.__module__, "swarm_plugins.")
"""Where layers are defined that are of no model's own kind."""


def keeps_states(layer: Any) -> bool:
    """Returns whether a layer of a cache has states, which hold every token that they have seen."""
    return _is_of_family(layer) or isinstance(layer, LinearAttentionCacheLayerMixin)


def stays_ahead(layer: Any) -> bool:
    """Returns whether a local layer has states that do not go back with its keys and values."""
    return keeps_states(layer) and "crop" not in (vars(type(layer)) if _is_of_family(layer) else ())


def check_can_crop(local: Sequence[Any]) -> None:
    """Raises UnsupportedError if local blocks have states that do not go back."""
    if any(stays_ahead(layer) and not layer.is_croppable for layer in local):
        raise UnsupportedError(
            "tokens were taken back from a cache with states of local blocks, which cannot go back: decode without a "
            "draft, or leave blocks with states to servers (local_blocks=(0, 0))"
        )


def check_lengths(local: Sequence[Any], length: int, *, is_torn: bool) -> None:
    """Raises UnsupportedError if local blocks have not seen exactly as many tokens as the remote ones will."""
    counting = (layer for layer in local if isinstance(layer, CacheLayerMixin))
    seen = next((int(layer.get_seq_length()) for layer in counting), length)
    if is_torn or seen != length:
        holds = f"{seen} tokens" if seen != length else "states"
        raise UnsupportedError(
            f"the cache holds {holds} of the local blocks and {length} tokens of the remote ones: an earlier step "
            "failed half-way; start with a new cache"
        )


def _is_of_family(layer: Any) -> bool:
    return not type(layer).__module__.startswith(_COMMON_LAYERS)
