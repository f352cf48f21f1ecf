"""Inputs and outputs of consecutive blocks, the same record on both ends of the wire.

Shapes: ``B`` batch, ``S`` new tokens, ``P`` prefix or cached tokens, ``D`` hidden width, ``E`` experts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import msgspec
import torch
from torch import Tensor

from swarm_plugins.adapter_spec import AdapterSpec
from swarm_plugins.layer_masks import LayerMasks
from swarm_plugins.rotary import tokens_to_pass

Inputs = TypeVar("Inputs", bound="SpanInputs")
Outputs = TypeVar("Outputs", bound="SpanOutputs")
Change = Callable[[Tensor], Tensor]


PAGE_TOKENS = 64
"""Servers allocate caches for, and know the beginnings of sessions by, so many tokens of each row."""
ROLLBACK_TOKENS = PAGE_TOKENS
"""A session may go back by so many tokens to before its last step, although a window has left those before: drafts
that are rejected, and steps that fail, reach no further."""


def in_pages(tokens: int) -> int:
    """Returns the tokens that whole pages for so many hold."""
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


def kept_by_window(window: int) -> int:
    """Returns the most tokens, in whole pages, that a sliding window keeps between single tokens.

    What it sees, what a session may go back by, and what is left of a page.
    """
    return in_pages(window) + ROLLBACK_TOKENS + PAGE_TOKENS


def page_size(tokens: int, limit: int) -> int:
    """Returns how many tokens to send at once, near ``tokens`` and at most ``limit``: whole pages if one fits.

    A server can then use what earlier sessions have begun with for all but the last part of a prompt.
    """
    if limit < PAGE_TOKENS:
        return min(tokens, limit)
    return min(-(-tokens // PAGE_TOKENS), limit // PAGE_TOKENS) * PAGE_TOKENS


class LoadedAdapter(msgspec.Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """An adapter, or its part on one span: structure, tensors and the name they go by."""

    digest: str = ""
    """Content hash of structure and tensors; empty while they are being trained."""
    spec: AdapterSpec
    tensors: tuple[Tensor, ...]
    """In the order of ``spec.tensor_shapes()``."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def map(self, change: Change) -> LoadedAdapter:
        """Returns the adapter with every tensor changed."""
        tensors = tuple(change(tensor) for tensor in self.tensors)
        return LoadedAdapter(digest=self.digest, spec=self.spec, tensors=tensors)


_ADAPTER_BITS = 16
WHOLE_ROW = 1 << 40
"""Offset of an adapter that applies to all tokens of its row; see `AdapterUse.with_starts`."""


def late_row(adapter: int, start: int) -> int:
    """Returns an entry of ``AdapterUse.rows`` for an adapter that applies from a token of the row on (aLoRA)."""
    return start << _ADAPTER_BITS | adapter


def adapter_of(row: int) -> int:
    """Returns the index of the adapter in an entry of ``AdapterUse.rows``, -1 for none."""
    return row if row < 0 else row & (1 << _ADAPTER_BITS) - 1


def start_of(row: int) -> int:
    """Returns the first token, cached ones counted, that the adapter of an entry applies to."""
    return 0 if row < 0 else row >> _ADAPTER_BITS


@dataclass(frozen=True, kw_only=True)
class AdapterUse:
    """Which adapters apply to which rows of a batch."""

    adapters: tuple[LoadedAdapter, ...] = ()
    rows: tuple[int, ...] | None = None
    """For each row the index of its one adapter, -1 for none; see `late_row`. None: all adapters on all rows."""
    dropout_seed: int | None = None
    """Seed of the dropout of the first row, one more for each row; None: no dropout (evaluation)."""
    first_token: int = 0
    """Where the tokens begin in their rows, for the dropout of a part of a row."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of all adapters, in order."""
        return tuple(tensor for adapter in self.adapters for tensor in adapter.tensors)

    def is_same(self, other: AdapterUse) -> bool:
        """Returns whether the very same tensors are applied in the same way."""
        return (
            (self.rows, self.dropout_seed) == (other.rows, other.dropout_seed)
            and [adapter.spec for adapter in self.adapters] == [adapter.spec for adapter in other.adapters]
            and [id(tensor) for tensor in self.tensors] == [id(tensor) for tensor in other.tensors]
        )

    def map(self, change: Change) -> AdapterUse:
        """Returns the same use of adapters with every tensor changed."""
        return replace(self, adapters=tuple(adapter.map(change) for adapter in self.adapters))

    def with_starts(self, offsets: Sequence[int], cached: int, new: int, before: Sequence[int] = ()) -> AdapterUse:
        """Returns the use with the first token of each row's adapter, counted from the row's beginning.

        Args:
            offsets: To how many of the last tokens it applies, for each of ``rows``.
            cached: Tokens before the new ones.
            new: New tokens.
            before: The rows of the step before. Where all new tokens are adapted, they go on with its start: equal
                steps are replayed together.
        """
        rows = []
        for index, (row, offset) in enumerate(zip(self.rows or (), offsets, strict=True)):
            start = 0 if offset == WHOLE_ROW else cached + new - min(offset, new)
            if start == cached and len(before) == len(offsets) and adapter_of(before[index]) == row:
                start = min(start, start_of(before[index]))
            rows.append(late_row(row, start) if row >= 0 else row)
        return replace(self, rows=tuple(rows))

    def take_rows(self, rows: slice | Tensor) -> AdapterUse:
        """Returns the use on some rows, with the dropout that they have in the batch if ``rows`` is a slice."""
        kept, seed = self.rows, self.dropout_seed
        if isinstance(rows, Tensor):
            return replace(self, rows=None if kept is None else tuple(kept[row] for row in rows.tolist()))
        return replace(
            self, rows=None if kept is None else kept[rows], dropout_seed=None if seed is None else seed + rows.start
        )


@dataclass(frozen=True, kw_only=True)
class SpanInputs:
    """Inputs of consecutive blocks, on one server or along a chain."""

    blocks: range
    """Global indices of the blocks to run."""
    hidden: Tensor
    """``[B, S, D]``; streams of them next to each other, side inputs behind; see `swarm_plugins.columns`."""
    position_ids: Tensor | None = None
    """``[B or 1, S]``, or of several planes, ``[3 or 4, B or 1, S]``. None: consecutive ones after what is cached."""
    attention_mask: Tensor | None = None
    """``[B, P + S]``, bool: True for real tokens. None: no padding."""
    layer_masks: LayerMasks | None = None
    """What new tokens see, if some see later ones. None: as the model has it."""
    token_ids: Tensor | None = None
    """``[B, S]``, where blocks take the ids of tokens. None: they do not."""
    adapters: AdapterUse = field(default_factory=AdapterUse)
    prefix: tuple[Tensor, ...] = ()
    """K then V for each block, ``[B, kv heads, P, head width]``."""
    collect_hidden: bool = False
    """Whether to also return the outputs of all blocks but the last."""
    hidden_of: frozenset[int] | None = None
    """The blocks whose outputs are wanted then; any tensor may stand for the others. None: all."""
    collect_router: bool = False
    """Whether to also return the router logits of mixture-of-experts blocks."""
    whole_beyond: int | None = None
    """If new tokens pass this length, those up to the first that does run at once; see `swarm_plugins.rotary`."""
    has_states: bool = False
    """Whether some block has states of fixed size. They see padding only in the first step, so it must run at once."""
    routers: Mapping[int, int | None] | None = None
    """The blocks that have router logits, each with their width or None if that is unknown. None: all unknown."""

    @property
    def num_tokens(self) -> int:
        """Rows times new tokens."""
        return self.hidden.shape[0] * self.hidden.shape[1]

    @property
    def is_plain(self) -> bool:
        """Whether tokens have one position, no ids, and see those before them: such sessions can share a forward."""
        has_planes = self.position_ids is not None and self.position_ids.ndim > 2
        return self.layer_masks is None and self.token_ids is None and not has_planes

    @property
    def collects_inner(self) -> bool:
        """Whether the output of some block but the last is wanted."""
        if self.hidden_of is None:
            return self.collect_hidden
        return self.collect_hidden and any(block in self.hidden_of for block in self.blocks[:-1])

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        """The tensors that may get a gradient: hidden states, adapters, prefix."""
        return (self.hidden, *self.adapters.tensors, *self.prefix)

    @property
    def needs_gradient(self) -> bool:
        """Whether autograd will ask for a gradient."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.differentiable)

    def map(self: Inputs, change: Change) -> Inputs:
        """Returns the inputs with every tensor changed, except the adapters'."""
        positions, mask, masks = self.position_ids, self.attention_mask, self.layer_masks
        return replace(
            self,
            hidden=change(self.hidden),
            token_ids=None if self.token_ids is None else change(self.token_ids),
            position_ids=None if positions is None else change(positions),
            attention_mask=None if mask is None else change(mask),
            layer_masks=None if masks is None else msgspec.structs.replace(masks, bits=change(masks.bits)),
            prefix=tuple(change(tensor) for tensor in self.prefix),
        )

    def take_rows(self: Inputs, rows: slice | Tensor) -> Inputs:
        """Returns some rows of the batch."""
        positions, mask, masks = self.position_ids, self.attention_mask, self.layer_masks
        return replace(
            self,
            hidden=self.hidden[rows],
            token_ids=None if self.token_ids is None else self.token_ids[rows],
            position_ids=positions if positions is None or positions.shape[-2] == 1 else positions[..., rows, :],
            attention_mask=None if mask is None else mask[rows],
            layer_masks=None if masks is None else masks.take_rows(rows),
            adapters=self.adapters.take_rows(rows),
            prefix=tuple(tensor[rows] for tensor in self.prefix),
        )

    def take_tokens(self: Inputs, start: int, end: int) -> Inputs:
        """Returns some of the new tokens; the mask ends with them, as later ones are not cached yet.

        Raises:
            UnsupportedError: If tokens on both sides of a border see each other.
        """
        mask, masks, use = self.attention_mask, self.layer_masks, self.adapters
        end = min(end, self.hidden.shape[1])
        return replace(
            self,
            hidden=self.hidden[:, start:end],
            token_ids=None if self.token_ids is None else self.token_ids[:, start:end],
            position_ids=None if self.position_ids is None else self.position_ids[..., start:end],
            adapters=use if use.dropout_seed is None else replace(use, first_token=use.first_token + start),
            # [B, P + S] -> [B, P + end]
            attention_mask=None if mask is None else mask[:, : mask.shape[1] - self.hidden.shape[1] + end],
            layer_masks=None if masks is None else masks.take_tokens(start, end),
        )

    def cut_tokens(self: Inputs, size: int, cached: int) -> list[Inputs]:
        """Cuts the new tokens into parts of at most ``size``, or longer ones where tokens belong together.

        Args:
            size: Tokens of each row.
            cached: Those before them.
        """
        num_new, least = self.hidden.shape[1], self.num_together(cached) or 1
        cuts = list(range(1, num_new + 1)) if self.layer_masks is None else self.layer_masks.cuts()
        cuts = [cut for cut in cuts if cut >= least]
        found, start = [], 0
        while start < num_new:
            # The last cut that fits, or the first one after `start`.
            end = cuts[max(bisect_right(cuts, start + size) - 1, bisect_right(cuts, start))]
            found.append(self.take_tokens(start, end))
            start = end
        return found

    def num_together(self, cached: int) -> int | None:
        """Returns how many new tokens, after ``cached`` ones, must run at once; None if they may be cut anywhere."""
        limit, num_new, mask = self.whole_beyond, self.hidden.shape[1], self.attention_mask if self.has_states else None
        passing = tokens_to_pass(limit, self.position_ids, cached=cached, num_new=num_new) if limit is not None else 0
        padded = [] if mask is None else (~mask[:, -num_new:].all(dim=0)).nonzero().flatten().tolist()
        return max(passing or 0, 1 + padded[-1] if padded else 0) or None

    def take_blocks(self: Inputs, blocks: range, hidden: Tensor) -> Inputs:
        """Returns the inputs of some of the blocks, with ``hidden`` as their hidden states."""
        first, end = (2 * (block - self.blocks.start) for block in (blocks.start, blocks.stop))
        return replace(self, blocks=blocks, hidden=hidden, prefix=self.prefix[first:end])


def sequence_positions(position_ids: Tensor | None) -> Tensor | None:
    """Returns the positions that tell where sequences begin, ``[B or 1, S]``; None if there are none.

    Of several planes, transformers takes the first of four; three are places in images and videos only.
    """
    if position_ids is None or position_ids.ndim == 2:
        return position_ids
    return position_ids[0] if position_ids.shape[0] == 4 else None


def have_jumps(position_ids: Tensor | None) -> bool:
    """Returns whether positions do not follow one another within a row."""
    positions = sequence_positions(position_ids)
    return positions is not None and bool((positions[:, 1:] - positions[:, :-1] != 1).any())


class SpanOutputs(msgspec.Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """Outputs of consecutive blocks; also the gradients of such outputs, each in its place."""

    hidden: Tensor
    """``[B, S, D]``."""
    hidden_states: tuple[Tensor, ...] = ()
    """Outputs of all blocks but the last, if asked for."""
    router_logits: tuple[Tensor, ...] = ()
    """``[B * S, E]`` for each mixture-of-experts block, if asked for."""
    router_blocks: tuple[int, ...] = ()
    """The blocks that ``router_logits`` belong to, ascending."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors: hidden, hidden states, router logits."""
        return (self.hidden, *self.hidden_states, *self.router_logits)

    def with_tensors(self: Outputs, tensors: Sequence[Tensor]) -> Outputs:
        """Returns outputs of the same layout with other tensors, in the order of the property ``tensors``."""
        first_router = 1 + len(self.hidden_states)
        return msgspec.structs.replace(
            self,
            hidden=tensors[0],
            hidden_states=tuple(tensors[1:first_router]),
            router_logits=tuple(tensors[first_router:]),
        )

    def map(self: Outputs, change: Change) -> Outputs:
        """Returns the outputs with every tensor changed."""
        return self.with_tensors([change(tensor) for tensor in self.tensors])

    def take_rows(self: Outputs, rows: slice) -> Outputs:
        """Returns the outputs of some rows of the batch."""
        logits = [one.unflatten(0, self.hidden.shape[:2])[rows].flatten(0, 1) for one in self.router_logits]
        return self.with_tensors([*(one[rows] for one in (self.hidden, *self.hidden_states)), *logits])


def join_outputs(parts: Sequence[SpanOutputs], dim: int) -> SpanOutputs:
    """Joins the outputs of an input that was cut along its rows (``dim`` 0) or its new tokens (1)."""
    if len(parts) == 1:
        return parts[0]

    def joined(logits: Sequence[Tensor]) -> Tensor:
        # [B * S, E] -> [B, S, E], joined, and back
        apart = [one.unflatten(0, part.hidden.shape[:2]) for one, part in zip(logits, parts, strict=True)]
        return torch.cat(apart, dim=dim).flatten(0, 1)

    states = zip(*(part.hidden_states for part in parts), strict=True)
    routers = zip(*(part.router_logits for part in parts), strict=True)
    return SpanOutputs(
        hidden=torch.cat([part.hidden for part in parts], dim=dim),
        hidden_states=tuple(torch.cat(same_block, dim=dim) for same_block in states),
        router_logits=tuple(joined(same_block) for same_block in routers),
        router_blocks=parts[0].router_blocks,
    )


def chain_outputs(parts: Sequence[SpanOutputs], *, collect_hidden: bool) -> SpanOutputs:
    """Joins the outputs of consecutive spans; hidden states passed from one span to the next are collected too."""
    states: list[Tensor] = []
    for index, part in enumerate(parts):
        states.extend(part.hidden_states)
        if collect_hidden and index + 1 < len(parts):
            states.append(part.hidden)
    return SpanOutputs(
        hidden=parts[-1].hidden,
        hidden_states=tuple(states),
        router_logits=tuple(logits for part in parts for logits in part.router_logits),
        router_blocks=tuple(block for part in parts for block in part.router_blocks),
    )


RETURN_FORMS = (0, 1, 2, 3)
"""Numbers of values that layers may return in a tuple, 0 for a tensor alone."""


def as_returned(hidden: Tensor, num_returned: int) -> Any:
    """Returns hidden states as layers do: alone if ``num_returned`` is 0, or first in a tuple of so many values."""
    return (hidden, *[None] * (num_returned - 1)) if num_returned else hidden


def is_same(one: Tensor, two: Tensor) -> bool:
    """Returns whether two tensors are one, or the second is a view of all of the first."""
    return one is two or (one.data_ptr() == two.data_ptr() and one.shape == two.shape and one.stride() == two.stride())


class CacheOp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change of a session's KV cache that takes effect before the next step.

    ``crop``: keep the first ``indices[0]`` tokens. ``reorder`` and ``select``: row ``i`` becomes the old row
    ``indices[i]``. ``repeat``: each row ``indices[0]`` times, copies side by side. ``reset``: forget all tokens.
    """

    kind: Literal["crop", "reorder", "select", "repeat", "reset"]
    indices: tuple[int, ...] = ()
