"""Caches of drafts and of the models that verify them: by which name a model takes one, and how it goes back."""

from __future__ import annotations

import copy
from collections.abc import Container
from typing import Any

from torch import nn
from transformers import Cache
from transformers.cache_utils import BaseQuantizedLayer

from swarm_plugins.backbone.local_layers import keeps_states
from swarm_plugins.backbone.served import stack_of

CACHE_NAMES = ("past_key_values", "cache_params")
"""Arguments by which models take their cache."""


def cache_name(known: Container[str]) -> str:
    """Returns the first of `CACHE_NAMES` among ``known``; the usual one, if there is none."""
    return next((name for name in CACHE_NAMES if name in known), CACHE_NAMES[0])


def seen_by(cache: Cache) -> int:
    """Returns how many tokens a cache holds; 0 if its layers have states alone, and do not say."""
    return max((int(one.get_seq_length()) for one in cache.layers if hasattr(one, "get_seq_length")), default=0)


def fixed_layers(cache: Cache, model: nn.Module) -> list[str]:
    """Returns the classes of local cache layers that cannot forget their last tokens."""
    stack = stack_of(model)
    remote = {block for chain in ([] if stack is None else stack.chains) for block in chain}
    local = (layer for index, layer in enumerate(cache.layers) if index not in remote)
    # Layers with quantized keys only crop those that they have not quantized yet.
    return sorted(
        {type(one).__name__ for one in local if not hasattr(one, "crop") or isinstance(one, BaseQuantizedLayer)}
    )


class Rewinder:
    """Takes back tokens of a local cache.

    Layers with keys and values are cropped. States are as they were when they were last kept: what came after must run
    again.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._kept: dict[int, Any] = {}
        self._length = 0

    def keep(self, length: int) -> None:
        """Keeps the states, which have seen ``length`` tokens."""
        self._kept = {index: copy.deepcopy(one) for index, one in enumerate(self._cache.layers) if keeps_states(one)}
        self._length = length

    def back(self, seen: int, length: int) -> int:
        """Goes back from ``seen`` tokens to ``length``, or to fewer if there are states; returns how many are left."""
        left = min(length, seen)
        if self._kept and left < seen:
            left = self._length
        for index, layer in enumerate[Any](self._cache.layers):
            if index not in self._kept:
                # Also by 0: sliding layers wait for it to drop what is behind their window.
                layer.crop(left - seen)
            elif left < seen:
                self._cache.layers[index] = self._kept[index]
        if left < seen:
            self._kept = {}
        return left
