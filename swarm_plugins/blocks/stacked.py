"""One new token of each row of several sessions in one forward: their rows lie under one another, ``[R, 1, D]``.

So layers with states of fixed size take the rows of all sessions as one batch. Attention runs session by session, as
in `packed`; or, in families without an interface for that, over keys and values that are padded on the left to the
longest session's length.

Letters in shapes: ``R`` rows of all sessions, ``B`` rows of a session, ``L`` its cached and new tokens, ``M`` the
longest session's, ``H`` heads, ``W`` head width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import cast

import torch
from torch import Tensor

from swarm_plugins.block_io import PAGE_TOKENS
from swarm_plugins.blocks.packed import ApartPast, PackedRows
from swarm_plugins.blocks.past import StatefulPast
from swarm_plugins.blocks.runner import StepInputs


class StackedPast(ApartPast, StatefulPast):
    """The caches of several sessions, each with one new token per row and with states of the same shapes.

    Args:
        parts: The sessions' rows.
        attention: See `ApartPast`.
        joined: See `ApartPast`.
    """

    def __init__(self, parts: Sequence[PackedRows], attention: str, joined: dict[int, bool]) -> None:
        super().__init__(max(part.length for part in parts) - 1, parts, attention, joined)
        # All sessions have states under the same keys.
        self._old = parts[0].cache.states
        self._rows = [part.batch_size for part in parts]

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Appends each session's keys of an indexer; returns all, ``[R, M, W]``."""
        pieces = zip(self.parts, indexer_key_states.split(self._rows), strict=True)
        return _padded([part.cache.append_index(layer_idx, keys) for part, keys in pieces], dim=1)

    def padding(self) -> Tensor | None:
        """Returns the mask of padded keys, ``[R, M]``; None if nothing is padded."""
        if all(part.attention_mask is None and part.length == self.length + 1 for part in self.parts):
            return None
        device = self.parts[0].step.hidden.device
        masks = [
            torch.ones(part.batch_size, part.length, dtype=torch.bool, device=device)
            if part.attention_mask is None
            else part.attention_mask
            for part in self.parts
        ]
        return _padded(masks, dim=1)

    def keep_states(self) -> None:
        """Hands each session the new states of its rows."""
        while self._new:
            key, whole = self._new.popitem()
            for part, own in zip(self.parts, cast("Tensor", whole).split(self._rows), strict=True):
                # A copy: a session that stays does not hold the memory of those that go.
                part.cache.new_states[key] = own.clone()

    def _copied(self, key: tuple[int, str, int]) -> Tensor:
        return torch.cat([cast("Tensor", part.cache.states[key]) for part in self.parts])

    def _cut(self, joined: Tensor, *, is_whole: bool = False) -> Sequence[Tensor]:
        pieces: Sequence[Tensor] = joined.split(self._rows)
        if not is_whole:
            return pieces
        return [piece[:, :, -part.length :] for part, piece in zip(self.parts, pieces, strict=True)]

    def _join(self, tensors: Sequence[Tensor]) -> Tensor:
        return _padded(tensors, dim=2)  # [R, H, M, W]

    def _together(self, outputs: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(outputs))  # [R, 1, H, W]


def stacks(steps: Sequence[StepInputs], *, pads: bool, longest: int | None = None) -> list[list[int]]:
    """Returns which steps can be stacked on one another, by their indices; each of the others is by itself.

    Args:
        steps: Steps of different sessions.
        pads: Whether keys are padded to the longest session's length. Then lengths differ by less than a factor of two,
            in whole pages: padding takes no more memory than the caches do.
        longest: Most cached tokens of a session that is stacked. None: any number.
    """
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, step in enumerate(steps):
        cache = step.cache
        if step.is_plain and step.hidden.shape[1] == 1 and 0 < cache.length <= (longest or cache.length):
            # States of a family's own kind are not packed: see `probe`.
            states = ((key, cast("Tensor", one)) for key, one in cache.states.items() if key[0] in step.blocks)
            shapes = frozenset((key, state.shape[1:], state.dtype) for key, state in states)
            size = (cache.length // PAGE_TOKENS).bit_length() if pads else 0
            groups[shapes, size].append(index)
        else:
            groups[index].append(index)
    return list(groups.values())


def _padded(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Joins rows, with zeros in front of the shorter ones along ``dim``."""
    longest = max(tensor.shape[dim] for tensor in tensors)
    if all(tensor.shape[dim] == longest for tensor in tensors):
        return torch.cat(list(tensors))
    shape = list(tensors[0].shape)
    shape[0], shape[dim] = sum(len(tensor) for tensor in tensors), longest
    joined = tensors[0].new_zeros(shape)
    for rows, tensor in zip(joined.split([len(tensor) for tensor in tensors]), tensors, strict=True):
        rows.narrow(dim, longest - tensor.shape[dim], tensor.shape[dim]).copy_(tensor)
    return joined
