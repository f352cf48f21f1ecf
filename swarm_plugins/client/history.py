"""What a client has sent to the session of one span: enough to open the same session elsewhere.

Changes of the cache (crop, reorder, ...) are applied to the record itself, so a replay needs no changes: it sends
what is left. ``B`` batch, ``S`` tokens of a step, ``L`` cached tokens, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarm_plugins.client.adapters import AdapterSelection
from swarm_plugins.transport.messages import CacheOp

__all__ = ["History", "SentStep"]


@dataclass(frozen=True, kw_only=True)
class SentStep:
    """The inputs of one step."""

    hidden: Tensor
    """``[B, S, D]``."""
    position_ids: Tensor
    """``[B or 1, S]``."""
    attention_mask: Tensor | None
    """``[B, L]``, as of this step."""
    adapters: AdapterSelection

    def rows(self, index: Tensor) -> SentStep:
        """Returns the step with other rows of the batch."""
        shared_positions = self.position_ids.shape[0] == 1
        return replace(
            self,
            hidden=self.hidden[index],
            position_ids=self.position_ids if shared_positions else self.position_ids[index],
            attention_mask=None if self.attention_mask is None else self.attention_mask[index],
        )

    def first(self, tokens: int, cached: int) -> SentStep:
        """Returns the first ``tokens`` of the step; ``cached`` tokens came before it."""
        return replace(
            self,
            hidden=self.hidden[:, :tokens],
            position_ids=self.position_ids[:, :tokens],
            attention_mask=None if self.attention_mask is None else self.attention_mask[:, : cached + tokens],
        )


class History:
    """The record of one span's session.

    Args:
        prefix: Keys and values that the cache started with, K then V for each block.
    """

    def __init__(self, prefix: tuple[Tensor, ...] = ()) -> None:
        self.prefix = prefix
        self.steps: list[SentStep] = []

    @property
    def length(self) -> int:
        """Cached tokens per row."""
        return self._prefix_length + sum(step.hidden.shape[1] for step in self.steps)

    @property
    def _prefix_length(self) -> int:
        return self.prefix[0].shape[2] if self.prefix else 0

    def copy(self) -> History:
        """Returns an independent record (the tensors are shared: they are never changed in place)."""
        other = History(self.prefix)
        other.steps = list(self.steps)
        return other

    def apply(self, op: CacheOp) -> None:
        """Changes the record as a server changes its cache."""
        if op.kind == "reset":
            self.prefix, self.steps = (), []
        elif op.kind == "crop":
            self._crop(op.indices[0])
        elif op.kind == "repeat":
            batch = self.batch_size
            self._rows(torch.arange(batch).repeat_interleave(op.indices[0]) if batch else None)
        else:
            self._rows(torch.tensor(op.indices, dtype=torch.long))

    @property
    def batch_size(self) -> int:
        """Rows of the batch; 0 before the first step."""
        if self.steps:
            return self.steps[0].hidden.shape[0]
        return self.prefix[0].shape[0] if self.prefix else 0

    def _rows(self, index: Tensor | None) -> None:
        if index is None:
            return
        self.prefix = tuple(tensor[index] for tensor in self.prefix)
        self.steps = [step.rows(index) for step in self.steps]

    def _crop(self, length: int) -> None:
        if length < self._prefix_length:
            self.prefix = tuple(tensor[:, :, :length] for tensor in self.prefix)
        cached = self._prefix_length
        kept = []
        for step in self.steps:
            tokens = min(step.hidden.shape[1], length - cached)
            if tokens <= 0:
                break
            kept.append(step.first(tokens, cached))
            cached += tokens
        self.steps = kept

    def merged(self) -> list[SentStep]:
        """Returns the steps joined to as few as possible: many decode steps replay as one prefill."""
        groups: list[list[SentStep]] = []
        for step in self.steps:
            if groups and groups[-1][-1].adapters.is_same(step.adapters):
                groups[-1].append(step)
            else:
                groups.append([step])
        joined: list[SentStep] = []
        cached = self._prefix_length
        for group in groups:
            joined.append(_joined(group, cached))
            cached += joined[-1].hidden.shape[1]
        return joined


def _joined(steps: Sequence[SentStep], cached: int) -> SentStep:
    if len(steps) == 1:
        return steps[0]
    batch = steps[0].hidden.shape[0]
    same_rows = all(step.position_ids.shape[0] == 1 for step in steps)
    positions = [s.position_ids if same_rows else s.position_ids.expand(batch, -1) for s in steps]
    position_ids = torch.cat(positions, dim=1)
    return SentStep(
        hidden=torch.cat([step.hidden for step in steps], dim=1),  # [B, sum of S, D]
        position_ids=position_ids,
        attention_mask=_joined_mask(steps, position_ids, cached),
        adapters=steps[-1].adapters,
    )


def _joined_mask(steps: Sequence[SentStep], position_ids: Tensor, cached: int) -> Tensor | None:
    """Returns the mask of joined steps, ``[B, L]``: the last one known, and nothing hidden behind it."""
    known = next((step.attention_mask for step in reversed(steps) if step.attention_mask is not None), None)
    follow_on = bool((position_ids[:, 1:] - position_ids[:, :-1] == 1).all())
    if known is None and follow_on:
        return None
    # Without any mask, positions that jump would be taken for several sequences packed into one.
    length = cached + position_ids.shape[1]
    mask = torch.ones(steps[0].hidden.shape[0], length, dtype=torch.bool)
    if known is not None:
        mask[:, : known.shape[1]] = known
    return mask
