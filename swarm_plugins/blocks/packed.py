"""Several sessions in one forward: projections and experts see all tokens, attention runs session by session.

The tokens of all sessions follow one another in one sequence ``[1, T, D]``; `stacked` lays them out as rows. Two
functions, registered in transformers under the name `PACKED`, replace a family's attention and mask: the mask function
returns a recipe instead of a tensor; the attention function cuts queries by session and calls the family's own
attention on each session's keys and values, with the mask that the recipe makes for it.

Letters in shapes: ``T`` tokens of all sessions, ``B`` rows of a session, ``S`` its new tokens per row, ``L`` its
cached and new tokens, ``H`` heads, ``W`` head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from swarm_plugins.block_io import SpanOutputs
from swarm_plugins.blocks.attending import attend
from swarm_plugins.blocks.calls import Call
from swarm_plugins.blocks.past import Past, PlainPast
from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.errors import UnsupportedError

PACKED = "swarm_packed"
"""Name of the attention and mask implementation."""
MOST_JOINED_TOKENS = 8192
"""Maximum cached and new tokens of all sessions in one forward if keys and values are expanded from latents, which
takes 82 kB a token in DeepSeek-V3. A single session may have more."""

_PAST: ContextVar[ApartPast | None] = ContextVar("swarm_packed_past", default=None)


class Packing(Enum):
    """How sessions of a model can share a forward, the best way first."""

    SEQUENCE = "all tokens in one sequence, attention session by session"
    ROWS = "one token of each row, rows of all sessions in one batch, attention session by session"
    PADDED = "the same, attention over keys and values that are padded to one length"
    NONE = "one after another"


class PackedRows:
    """The tokens of one session in a packed forward, from position ``start`` on."""

    def __init__(self, step: StepInputs, start: int) -> None:
        self.step = step
        self.cache = step.cache
        self.start = start
        self.batch_size, self.num_new = step.hidden.shape[:2]
        self.num_tokens = self.batch_size * self.num_new
        self.length = step.cache.length + self.num_new
        self.attention_mask = padding_of(step)

    def positions(self) -> Tensor:
        """Returns the position of each new token, ``[1, B * S]``."""
        positions = self.step.position_ids
        if positions is None:
            positions = torch.arange(self.length - self.num_new, self.length, device=self.step.hidden.device)[None]
        return positions.expand(self.batch_size, -1).reshape(1, -1)

    def outputs(self, hidden: Tensor, call: Call) -> SpanOutputs:
        """Cuts this session's outputs out of a packed call's."""
        routers = (call.router_logits or {}) if self.step.collect_router else {}
        between = (call.between or ()) if self.step.collect_hidden else ()
        first, *states = (self._own(state) for state in (hidden, *between))
        return SpanOutputs(
            hidden=first,
            hidden_states=tuple(states),
            router_logits=tuple(logits.narrow(0, self.start, self.num_tokens) for logits in routers.values()),
            router_blocks=tuple(routers),
        )

    def _own(self, state: Tensor) -> Tensor:
        # [1, T, D], or [T, 1, D] of stacked rows
        rows = state.reshape(-1, state.shape[-1]).narrow(0, self.start, self.num_tokens)
        return rows.view(self.step.hidden.shape)


def rows_of(steps: Sequence[StepInputs]) -> list[PackedRows]:
    """Returns where the tokens of each session lie in a packed forward."""
    parts: list[PackedRows] = []
    start = 0
    for step in steps:
        parts.append(PackedRows(step, start))
        start += parts[-1].num_tokens
    return parts


def bounded(steps: Sequence[StepInputs], group: Sequence[int]) -> list[list[int]]:
    """Splits a group of steps, by their indices, where keys and values are computed from all that the caches hold.

    MLA's latents expand many times over, for all sessions of a forward at once.
    """
    groups: list[list[int]] = []
    room = 0
    for index in group:
        rows, num_new = steps[index].hidden.shape[:2]
        num_tokens = rows * (steps[index].cache.length + num_new)
        if num_tokens > room:
            groups.append([])
            room = MOST_JOINED_TOKENS
        groups[-1].append(index)
        room -= num_tokens
    return groups


def padding_of(step: StepInputs) -> Tensor | None:
    """Returns a step's padding mask; None where nothing is padded: most kernels then need no mask."""
    mask = step.attention_mask
    return None if mask is None or bool(mask.all()) else mask


class ApartPast(Past):
    """The caches of several sessions; each session attends only to its own.

    Args:
        length: Tokens before the new ones, as far as the model can tell.
        parts: The sessions' tokens, in their order.
        attention: The attention implementation that the family uses otherwise.
        joined: By block, whether a family works on keys and values between the cache and attention (as MLA does, which
            caches latents): it then gets all sessions' in one tensor. Learnt while running.
    """

    def __init__(self, length: int, parts: Sequence[PackedRows], attention: str, joined: dict[int, bool]) -> None:
        super().__init__(length)
        self.parts = parts
        self.attention = attention
        self._joined = joined
        self._handed: tuple[int, Tensor, Tensor] | None = None
        self._apart: dict[int, tuple[int, Tensor, Tensor]] = {}
        """By the id of keys, those that stand for each session's own: later blocks may attend to them, too."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends each session's tokens to its cache."""
        for part, keys, values in zip(self.parts, self._cut(key_states), self._cut(value_states), strict=True):
            block, slot = divmod(layer_idx, part.cache.slots)
            part.cache.append(block, keys, values, slot)
        if self._joined.get(layer_idx, True):
            views = [_view(part, layer_idx) for part in self.parts]
            key_states, value_states = (self._join(each) for each in zip(*views, strict=True))
        self._handed = (layer_idx, key_states, value_states)
        if not self._joined.get(layer_idx, True):
            self._apart[id(key_states)] = self._handed
        return key_states, value_states

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: PackedMask | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Runs the family's attention for each session."""
        if self._handed is None:
            raise UnsupportedError(
                f"{type(module).__name__} runs attention without having updated its cache: such blocks cannot be packed"
            )
        layer, handed_key, handed_value = self._apart.get(id(key), self._handed)
        is_untouched = key is handed_key and value is handed_value
        self._joined.setdefault(layer, not is_untouched)
        outputs = []
        whole = [] if is_untouched else [self._cut(each, is_whole=True) for each in (key, value)]
        for index, (part, rows) in enumerate(zip(self.parts, self._cut(query), strict=True)):
            keys, values = _view(part, layer) if is_untouched else (each[index] for each in whole)
            part_mask = None if mask is None else mask.of(index, part.length - keys.shape[2])
            # [B, S, H, W]
            outputs.append(attend(self.attention, module, rows, keys, values, part_mask, **kwargs))
        return self._together(outputs), None

    def _cut(self, joined: Tensor, *, is_whole: bool = False) -> Sequence[Tensor]:
        """Cuts queries, keys or values by session, as ``[B, H, S, W]``; with cached tokens if whole."""
        raise NotImplementedError

    def _join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Joins all sessions' keys or values, ``[B, H, L, W]``, so that `_cut` finds them again."""
        raise NotImplementedError

    def _together(self, outputs: Sequence[Tensor]) -> Tensor:
        """Joins all sessions' outputs of attention, ``[B, S, H, W]``."""
        raise NotImplementedError


class PackedPast(ApartPast, PlainPast):
    """The caches of several sessions, whose tokens follow one another in one sequence."""

    def __init__(self, parts: Sequence[PackedRows], attention: str, joined: dict[int, bool]) -> None:
        super().__init__(0, parts, attention, joined)
        self._new_sizes = [part.num_tokens for part in parts]
        self._whole_sizes = [part.batch_size * part.length for part in parts]
        self._has_single_rows = all(part.batch_size == 1 for part in parts)

    def _cut(self, joined: Tensor, *, is_whole: bool = False) -> Sequence[Tensor]:
        # [1, H, tokens of all sessions, W]
        sizes = self._whole_sizes if is_whole else self._new_sizes
        pieces = joined.split_with_sizes(sizes, 2)
        if self._has_single_rows:
            return pieces
        return [
            piece.reshape(piece.shape[1], part.batch_size, -1, piece.shape[3]).transpose(0, 1)
            for part, piece in zip(self.parts, pieces, strict=True)
        ]

    def _join(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = [
            tensor if tensor.shape[0] == 1 else tensor.transpose(0, 1).reshape(1, tensor.shape[1], -1, tensor.shape[3])
            for tensor in tensors
        ]
        return torch.cat(flat, dim=2)  # [1, H, sum of B * L, W]

    def _together(self, outputs: Sequence[Tensor]) -> Tensor:
        flat = [one if one.shape[0] == 1 else one.reshape(1, -1, *one.shape[2:]) for one in outputs]
        return torch.cat(flat, dim=1)  # [1, T, H, W]


class PackedMask:
    """The arguments of a family's mask; makes the mask of each session when its attention runs."""

    def __init__(self, past: ApartPast, arguments: dict[str, Any]) -> None:
        self._past = past
        self._arguments = arguments
        self._made: dict[tuple[int, int], Tensor | None] = {}

    def of(self, index: int, first: int) -> Tensor | None:
        """Returns the mask of a session from its ``first`` token on; None where its attention does not need one."""
        if (index, first) not in self._made:
            part = self._past.parts[index]
            sizes = {
                "batch_size": part.batch_size,
                "q_length": part.num_new,
                "kv_length": part.length - first,
                "q_offset": part.length - part.num_new,
                "kv_offset": first,
                "attention_mask": part.attention_mask,
            }
            make = ALL_MASK_ATTENTION_FUNCTIONS[self._past.attention]
            self._made[index, first] = make(**{**self._arguments, **sizes})
        return self._made[index, first]


@contextmanager
def packed_past(past: ApartPast) -> Iterator[None]:
    """Sets the packed past that this thread's attention works on."""
    token = _PAST.set(past)
    try:
        yield
    finally:
        _PAST.reset(token)


def _view(part: PackedRows, layer: int) -> tuple[Tensor, Tensor]:
    block, slot = divmod(layer, part.cache.slots)
    return part.cache.view(block, part.length, slot)


def _current() -> ApartPast:
    past = _PAST.get()
    if past is None:
        raise UnsupportedError(f"the attention implementation {PACKED!r} only works inside a packed step")
    return past


def _packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: PackedMask | None, **kwargs: Any
) -> tuple[Tensor, None]:
    return _current().attend(module, query, key, value, attention_mask, **kwargs)


def _packed_mask(**arguments: Any) -> PackedMask:
    return PackedMask(_current(), arguments)


AttentionInterface.register(PACKED, _packed_attention)
AttentionMaskInterface.register(PACKED, _packed_mask)
