"""What a model's forward gets as ``past_key_values``: a session's cache, several sessions' caches, or a prefix.

Each is a transformers ``Cache`` without layers of its own: it knows the length of the past, takes new keys and values
and returns those to attend to. Blocks with a sliding window may have lost tokens that it has left; their mask begins
behind them, as with transformers' ``DynamicSlidingWindowLayer``. States of fixed size are handed out and taken as its
``LinearAttentionLayer`` does, but never changed in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache

from swarm_plugins.blocks.kv import KVCache, States
from swarm_plugins.blocks.layout import BlockKV
from swarm_plugins.blocks.own_layers import OWN, LayersView, OwnLayers, OwnState
from swarm_plugins.errors import UnsupportedError

CONV, RECURRENT, KEPT = "conv", "recurrent", "kept"


class Past(Cache):
    """A past of a known length."""

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

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns False: states are kept by whoever keeps the past."""
        return False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes the new keys and values of a block; returns all of them."""
        raise NotImplementedError


def _refused(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        "blocks that cache more than keys and values (recurrent or convolution states, an indexer) cannot be packed, "
        "and take no prefix of keys and values"
    )


class PlainPast(Past):
    """A past that refuses blocks which cache anything but keys and values."""

    has_previous_state = get_conv_state = update_conv_state = _refused
    get_recurrent_state = update_recurrent_state = update_indexer = _refused
    get_kept = keep = _refused


class StatefulPast(Past):
    """A past with states.

    Args:
        length: Tokens before the new ones.
        old: The states of these. None: there are none.
        new: Filled with the states after the new tokens.
        own: Makes the cache layers of a family's own kind. None: there are none.
    """

    def __init__(
        self, length: int, old: States | None = None, new: States | None = None, own: OwnLayers | None = None
    ) -> None:
        super().__init__(length)
        self._old = {} if old is None else old
        self._new = {} if new is None else new
        self._own = own
        if own is not None:
            self.layers = LayersView(self._own_state)  # type: ignore[assignment]  # for a list

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Returns whether a block has states; without one, whether there are tokens before the new ones."""
        if layer_idx is None:
            return self.length > 0
        known = {*self._old, *self._new}
        return any(block == layer_idx and state_idx in (None, number) for block, _, number in known)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the last inputs of a convolution, ``[B, channels, kernel]``."""
        return self._get((layer_idx, CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns a recurrence's state."""
        return self._get((layer_idx, RECURRENT, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Takes the new inputs of a convolution; returns them behind the ones before, or behind zeros."""
        key = (layer_idx, CONV, state_idx)
        before = self._get(key)
        if before is None:
            kernel = conv_kernel_size or conv_states.shape[-1]
            whole = functional.pad(conv_states, (max(0, kernel - conv_states.shape[-1]), 0))
        else:
            kernel = before.shape[-1]
            whole = torch.cat([before, conv_states], dim=-1)
        self._new[key] = whole[..., -kernel:].clone()
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Takes a recurrence's new state, and returns it."""
        key = (layer_idx, RECURRENT, state_idx)
        before = self._get(key)
        found = self._new[key] = recurrent_states if before is None else recurrent_states.to(before.dtype)
        return found

    def get_kept(self, block: int, number: int) -> Tensor | None:
        """Returns a state that the family keeps by means of its own, ``[B, ...]``; see `keepers`."""
        return self._get((block, KEPT, number))

    def keep(self, block: int, number: int, state: Tensor) -> None:
        """Takes such a state as it is after the new tokens."""
        self._new[block, KEPT, number] = state

    def _get(self, key: tuple[int, str, int]) -> Tensor | None:
        found = self._new.get(key)
        if found is None and key in self._old:
            # Single-token kernels silently update it in place, and the old state must survive.
            found = self._new[key] = self._copied(key)
        return cast("Tensor | None", found)

    def _own_state(self, block: int) -> OwnState:
        key = (block, OWN, 0)
        if key not in self._new:
            self._new[key] = self._old[key].clone() if key in self._old else cast("OwnLayers", self._own).empty(block)
        return cast("OwnState", self._new[key])

    def _copied(self, key: tuple[int, str, int]) -> Tensor | OwnState:
        return self._old[key].clone()


class SessionPast(StatefulPast):
    """One session's cache: appends in place and returns views.

    ``joined`` tells by block whether the family computes with what the cache returns before it attends to it.
    """

    def __init__(self, cache: KVCache, joined: Mapping[int, bool], own: OwnLayers) -> None:
        super().__init__(cache.length, cache.states, cache.new_states, own)
        self._cache = cache
        self._slots = cache.slots
        self._joined = joined
        self._is_windowed = cache.is_windowed

    @property
    def is_sliding(self) -> list[bool]:
        """Whether each layer keeps a window; transformers looks for the first one of a kind when it makes a mask."""
        blocks = range(self._cache.blocks.stop if self._is_windowed else 0)
        return [self._cache.keeps_window(block) for block in blocks]

    @property
    def is_linear(self) -> list[bool]:
        """Of as many layers, which of them are not of attention: those that are not here."""
        return [block not in self._cache.blocks for block in range(len(self.is_sliding))]

    is_dummy = is_linear

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Returns how many tokens a mask covers, and where it starts."""
        first = self._cache.first(layer_idx) if self._is_windowed else 0
        return self.length + query_length - first, first

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends, and returns the whole sequence."""
        block, slot = divmod(layer_idx, self._slots)
        self._cache.append(block, key_states, value_states, slot)
        keys, values = self._cache.view(block, self.length + key_states.shape[2], slot)
        if self._joined.get(layer_idx, False):
            # Matrix products of rows with gaps between them take another path, with other rounding.
            return keys.contiguous(), values.contiguous()
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Appends an indexer's keys, and returns the whole sequence."""
        return self._cache.append_index(layer_idx, indexer_key_states)


class PrefixPast(PlainPast):
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


@dataclass
class _Noted:
    """What a block caches, as far as is known."""

    keys: Tensor | None = None
    values: Tensor | None = None
    index: Tensor | None = None


class ProbePast(StatefulPast):
    """Notes what each block caches, for one row; what others do counts for the first one."""

    def __init__(self, blocks: range, own: OwnLayers) -> None:
        self._blocks = blocks
        self._states: States = {}
        super().__init__(0, {}, self._states, own)
        self._noted: dict[int, _Noted] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Notes shapes and type, returns its input."""
        noted = self._noted.setdefault(layer_idx, _Noted())
        noted.keys, noted.values = key_states, value_states
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Notes shape and type, returns its input."""
        self._noted.setdefault(layer_idx, _Noted()).index = indexer_key_states
        return indexer_key_states

    def slots(self, blocks: range) -> int:
        """Returns how many keys and values each block caches, if some have several attentions.

        Raises:
            UnsupportedError: If these are not numbered from block to block.
        """
        number = 1 if all(index in blocks for index in self._noted) else len(self._noted) // len(blocks)
        if number > 1 and sorted(self._noted) != list(range(number * blocks.start, number * blocks.stop)):
            raise UnsupportedError(
                f"blocks {blocks.start}:{blocks.stop} cache keys and values as layers {sorted(self._noted)}: use a "
                "model of another family"
            )
        return number

    @property
    def has_own(self) -> bool:
        """Whether a block has a cache layer of its family's own kind."""
        return any(kind == OWN for _, kind, _ in self._states)

    def state_bytes(self, block: int) -> int:
        """Returns the bytes of a block's states."""
        owners = (
            (of if of in self._blocks else self._blocks.start, state) for (of, _, _), state in self._states.items()
        )
        return sum(state.nbytes for owner, state in owners if owner == block)

    def layout(self, block: int, dtype: torch.dtype, slots: int = 1) -> BlockKV:
        """Returns what a block caches; nothing, if it has no attention and no states."""
        noted = self._noted.get(slots * block, _Noted())
        row_bytes = self.state_bytes(block)
        layout = BlockKV(0, 0, 0, 0, dtype, row_bytes=row_bytes, slots=slots)
        if noted.keys is not None and noted.values is not None:
            keys, values = noted.keys.shape, noted.values.shape
            layout = layout._replace(
                key_heads=keys[1],
                key_width=keys[3],
                value_heads=values[1],
                value_width=values[3],
                dtype=noted.keys.dtype,
            )
        if noted.index is not None:
            layout = layout._replace(index_width=noted.index.shape[2], index_dtype=noted.index.dtype)
        return layout
