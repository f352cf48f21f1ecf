"""Record of what a client has sent to one span's session: enough to rebuild it on another server.

Cache changes (crop, reorder, ...) are applied to the record, so a replay sends only what is left.
``B`` batch, ``S`` tokens of a step, ``L`` cached tokens, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from swarm_plugins.block_io import CacheOp, LoadedAdapter, SpanInputs, have_jumps


class History:
    """The record of one span's session."""

    def __init__(self, prefix: tuple[Tensor, ...] = ()) -> None:
        self.prefix = prefix
        """Keys and values the cache started with, K then V for each block."""
        self.steps: list[SpanInputs] = []
        """The steps sent so far, with their positions."""
        self.length = self._prefix_length
        """Cached tokens per row. A running count: summing the steps at every token would make decoding quadratic."""
        self.digests: dict[LoadedAdapter, str] = {}
        """The digest of each adapter's part at the first step that used it."""

    @property
    def _prefix_length(self) -> int:
        return self.prefix[0].shape[2] if self.prefix else 0

    @property
    def batch_size(self) -> int:
        """Rows of the batch; 0 before the first step."""
        if self.steps:
            return self.steps[0].hidden.shape[0]
        return self.prefix[0].shape[0] if self.prefix else 0

    def copy(self) -> History:
        """Returns an independent record (the tensors are shared: they are never changed in place)."""
        other = History(self.prefix)
        other.steps, other.length, other.digests = list(self.steps), self.length, dict(self.digests)
        return other

    def append(self, inputs: SpanInputs, digests: Sequence[str] = ()) -> None:
        """Appends a step that has run, with the ``digests`` of its adapters."""
        for adapter, digest in zip(inputs.adapters.adapters, digests, strict=False):
            self.digests.setdefault(adapter, digest)
        end = self.length + inputs.hidden.shape[1]
        positions = inputs.position_ids
        if positions is None:
            positions = torch.arange(self.length, end)[None]  # [1, S]
        sent = SpanInputs(
            blocks=inputs.blocks,
            hidden=inputs.hidden.detach(),
            position_ids=positions,
            attention_mask=inputs.attention_mask,
            layer_masks=inputs.layer_masks,
            token_ids=inputs.token_ids,
            adapters=inputs.adapters,
            whole_beyond=inputs.whole_beyond,
        )
        self.steps.append(sent)
        self.length = end

    def apply(self, op: CacheOp) -> None:
        """Changes the record as a server changes its cache."""
        if op.kind == "reset":
            self.prefix, self.steps, self.length = (), [], 0
        elif op.kind == "crop":
            self._crop(op.indices[0])
        elif op.kind == "repeat":
            self._take_rows(torch.arange(self.batch_size).repeat_interleave(op.indices[0]))
        else:
            self._take_rows(torch.tensor(op.indices, dtype=torch.long))
        if not self.steps:
            self.digests = {}

    def _take_rows(self, rows: Tensor) -> None:
        self.prefix = tuple(tensor[rows] for tensor in self.prefix)
        self.steps = [step.take_rows(rows) for step in self.steps]

    def _crop(self, length: int) -> None:
        if length < self._prefix_length:
            self.prefix = tuple(tensor[:, :, :length] for tensor in self.prefix)
        # From the end: usually a few tokens go and thousands of steps stay.
        while self.steps and self.length > length:
            before = self.length - self.steps[-1].hidden.shape[1]
            # Raises first, where tokens that see each other would be cut apart.
            kept = [self.steps[-1].take_tokens(0, length - before)] if before < length else []
            self.steps[-1:] = kept
            self.length = length if kept else before
        self.length = min(self.length, length)

    def merged(self, first: int = 0) -> list[SpanInputs]:
        """Joins steps, from the ``first`` on, wherever possible: many decode steps replay as one prefill."""
        groups: list[list[SpanInputs]] = []
        for step in self.steps[first:]:
            if groups and _are_joinable(groups[-1][-1], step):
                groups[-1].append(step)
            else:
                groups.append([step])
        joined: list[SpanInputs] = []
        cached = self._prefix_length + sum(step.hidden.shape[1] for step in self.steps[:first])
        for group in groups:
            joined.append(_joined(group, cached))
            cached += joined[-1].hidden.shape[1]
        return joined


def _are_joinable(one: SpanInputs, two: SpanInputs) -> bool:
    """Returns whether two steps give the same as one, which has its mask made by the model."""
    if one.layer_masks is not None or two.layer_masks is not None or not _hide_the_same(one, two):
        return False
    # Steps of a record have positions: what was cached before them does not matter.
    if (one.num_together(0) is None) != (two.num_together(0) is None):
        return False
    planes = [step.position_ids.shape[:-2] for step in (one, two) if step.position_ids is not None]
    return planes[:1] == planes[-1:] and one.adapters.is_same(two.adapters)


def _hide_the_same(one: SpanInputs, two: SpanInputs) -> bool:
    """Returns whether the second step hides what the first one does, of the tokens up to it; no mask hides none."""
    earlier, later = one.attention_mask, two.attention_mask  # [B, L], [B, L + S]
    if later is None:
        return earlier is None or bool(earlier.all())
    seen = later[:, : later.shape[1] - two.hidden.shape[1]]
    return bool(seen.all()) if earlier is None else torch.equal(seen, earlier)


def _joined(steps: Sequence[SpanInputs], cached: int) -> SpanInputs:
    if len(steps) == 1:
        return steps[0]
    batch = steps[0].hidden.shape[0]
    positions = [step.position_ids for step in steps if step.position_ids is not None]
    if any(each.shape[-2] > 1 for each in positions):
        positions = [each.expand(*each.shape[:-2], batch, -1) for each in positions]
    position_ids = torch.cat(positions, dim=-1)
    ids = [step.token_ids for step in steps if step.token_ids is not None]
    return replace(
        steps[-1],
        token_ids=torch.cat(ids, dim=1) if ids else None,
        hidden=torch.cat([step.hidden for step in steps], dim=1),  # [B, sum of S, D]
        position_ids=position_ids,
        attention_mask=_joined_mask(steps, position_ids, cached),
    )


def _joined_mask(steps: Sequence[SpanInputs], position_ids: Tensor, cached: int) -> Tensor | None:
    """Returns the mask of joined steps, which hide the same, ``[B, L]``: the last known one, then all visible."""
    known = next((step.attention_mask for step in reversed(steps) if step.attention_mask is not None), None)
    if known is None and not have_jumps(position_ids):
        return None
    # Without a mask, positions that jump would be taken for several sequences packed into one.
    length = cached + position_ids.shape[-1]
    mask = torch.ones(steps[0].hidden.shape[0], length, dtype=torch.bool)
    if known is not None:
        mask[:, : known.shape[1]] = known
    return mask
