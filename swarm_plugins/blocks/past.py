"""What a model's forward gets as ``past_key_values``: a session's cache, several sessions' caches, or a prefix.

Each is a transformers ``Cache`` without layers of its own: it knows the length of the past, takes new keys and values
and returns those to attend to. Sliding-window layers keep everything; their mask makes the window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from swarm_plugins.blocks.kv import BlockKV, KVCache
from swarm_plugins.errors import UnsupportedError


def _refused(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        "blocks that cache more than keys and values (recurrent or convolution states, an indexer) are not supported: "
        "serve a model whose blocks use attention"
    )


class Past(Cache):
    """A past of a known length; refuses blocks that cache anything but keys and values."""

    has_previous_state = get_conv_state = update_conv_state = _refused
    get_recurrent_state = update_recurrent_state = update_indexer = _refused

    def __init__(self, length: int) -> None:
        super().__init__(layers=[])
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of tokens before the new ones."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Returns how many tokens a mask covers, and where it starts."""
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Returns -1: no maximum."""
        return -1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes the new keys and values of a block; returns all of them."""
        raise NotImplementedError


class SessionPast(Past):
    """One session's cache: appends in place and returns views.

    ``joined`` tells by block whether the family computes with what the cache returns before it attends to it.
    """

    def __init__(self, cache: KVCache, joined: Mapping[int, bool]) -> None:
        super().__init__(cache.length)
        self._cache = cache
        self._joined = joined

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends, and returns the whole sequence."""
        self._cache.append(layer_idx, key_states, value_states)
        keys, values = self._cache.view(layer_idx, self.length + key_states.shape[2])
        if self._joined.get(layer_idx, False):
            # Matrix products of rows with gaps between them take another path, with other rounding.
            return keys.contiguous(), values.contiguous()
        return keys, values


class PrefixPast(Past):
    """Keys and values before the sequence, K then V for each block, ``[B, H, P, W]``; differentiable.

    ``made`` gets the keys and values of the new tokens, if it is given.
    """

    def __init__(self, prefix: Sequence[Tensor], blocks: range, made: list[Tensor] | None = None) -> None:
        super().__init__(prefix[0].shape[2])
        self._prefix = dict(zip(blocks, zip(prefix[::2], prefix[1::2], strict=True), strict=True))
        self._made = made

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns prefix and new tokens."""
        if self._made is not None:
            self._made.extend((key_states, value_states))
        keys, values = self._prefix[layer_idx]
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)


class ProbePast(Past):
    """Notes what each block caches for a token."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layouts: dict[int, BlockKV] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Notes shapes and type, returns its input."""
        self.layouts[layer_idx] = BlockKV(
            key_states.shape[1], key_states.shape[3], value_states.shape[1], value_states.shape[3], key_states.dtype
        )
        return key_states, value_states
