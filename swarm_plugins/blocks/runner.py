"""The seam between a server and the blocks it runs: a runner of a span."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarm_plugins.block_io import PAGE_TOKENS, SpanInputs, SpanOutputs, in_pages
from swarm_plugins.blocks.kv import KVCache
from swarm_plugins.blocks.layout import BlockKV, SessionBytes
from swarm_plugins.borders import NO_TIES


@dataclass(frozen=True, kw_only=True)
class SpanSpec:
    """What a span holds and accepts; requests are checked against it before they reach the span."""

    blocks: range
    """Global indices of its blocks."""
    tied: frozenset[int] = NO_TIES
    """Blocks of the model that only run behind the one before; see `swarm_plugins.borders`."""
    left: range | None = None
    """Blocks that are still held for open sessions after a move, in addition."""
    hidden_size: int
    dtype: torch.dtype
    """Type of hidden states and prefixes."""
    device: torch.device
    """Where hidden states and prefixes are expected."""
    max_positions: int
    """Longest sequence of the model."""
    kv_layouts: Mapping[int, BlockKV]
    """What each block caches, and what its prefix must look like."""
    has_fixed_positions: bool = True
    """Whether rows may be run in parts: no part changes how the others are encoded."""
    whole_beyond: int | None = None
    """As in `SpanInputs`: if new tokens pass this length, those up to the first that does run at once."""
    pair_bytes: int = 0
    """Memory of attention scores, or of an indexer's, for one pair of tokens in one row. 0: they are never whole."""
    makes_masks: bool = False
    """Whether attention gets a mask also where nothing is padded, as sliding windows need."""
    vocab_size: int = 0
    """How many ids of tokens there are, if blocks take them. 0: they do not."""
    mask_kinds: tuple[str, ...] = ()
    """Kinds of layers whose masks a request may bring, all of them at once; one empty name if all have the same."""
    position_planes: tuple[int, ...] = ()
    """How many planes positions may have, besides one alone."""

    @property
    def kv_token_bytes(self) -> int:
        """Bytes that one token of one row takes in the caches of all blocks, until it leaves a window."""
        return sum(layout.token_bytes for layout in self.kv_layouts.values())

    @property
    def wide_token_bytes(self) -> int:
        """The same outside of caches: as wide as they are computed."""
        return sum(layout._replace(is_coded=False).token_bytes for layout in self.kv_layouts.values())

    @property
    def kv_row_bytes(self) -> int:
        """Bytes that one row takes there at any length: its states, and those before the last step."""
        return self.session_bytes(self.kv_layouts).row_bytes

    @property
    def has_states(self) -> bool:
        """Whether some block has states."""
        return any(layout.has_states for layout in self.kv_layouts.values())

    def session_bytes(self, blocks: Iterable[int]) -> SessionBytes:
        """Returns what the caches of those blocks take that are held here."""
        return SessionBytes.of(self.kv_layouts[block] for block in blocks if block in self.kv_layouts)

    def bytes_at_once(self, blocks: Iterable[int], num_tokens: int) -> int:
        """Returns what a row takes that begins with so many tokens: those that leave a window go with the next step."""
        known = self.session_bytes(blocks)
        return known.row_bytes + in_pages(num_tokens) * (known.token_bytes + known.window_bytes)

    @property
    def kv_row_tokens(self) -> int:
        """Tokens, as `kv_tokens` counts them, that each row after the first takes at any length."""
        if self.kv_token_bytes:
            return -(-self.kv_row_bytes // self.kv_token_bytes)
        return self.max_positions if self.kv_row_bytes else 0

    def kv_tokens(self, num_bytes: int) -> int:
        """Returns how many tokens of one row fit into ``num_bytes``, in whole pages.

        If a row takes the same memory at any length, each one that fits counts as the model's longest. A token that
        takes none counts as a byte. With windows, several rows may have room for fewer tokens, but for those that
        would fit if all were kept.
        """
        if self.kv_token_bytes:
            whole = max(0, num_bytes - self.kv_row_bytes) // self.kv_token_bytes
            fitting = max(whole, min(self.max_positions, self.session_bytes(self.kv_layouts).tokens_in(num_bytes)))
            return fitting // PAGE_TOKENS * PAGE_TOKENS
        return num_bytes // self.kv_row_bytes * self.max_positions if self.kv_row_bytes else num_bytes


@dataclass(frozen=True, kw_only=True)
class StepInputs(SpanInputs):
    """New tokens of one session, packed with other sessions'; a prefix is in its cache already."""

    cache: KVCache
    goes_on: bool = False
    """Whether they are a further part of the session's last step, and are taken back with it."""
    to_come: int = 0
    """Tokens of the same step in each row that run later: its cache makes room for them, too."""


class SpanRunner(Protocol):
    """Runs consecutive blocks of a model. All calls come from one thread."""

    @property
    def spec(self) -> SpanSpec:
        """What the span holds and accepts."""

    def new_cache(self, batch_size: int, blocks: range, prefix: Sequence[Tensor] = ()) -> KVCache:
        """Opens an empty cache, without memory, or one that starts with ``prefix`` (K then V for each block).

        Raises:
            CapacityError: If the KV budget has no room for the prefix.
        """

    def forward(self, inputs: SpanInputs) -> SpanOutputs:
        """Runs ``inputs.blocks``; differentiable where gradients are enabled."""

    def forward_part(self, inputs: SpanInputs) -> tuple[SpanOutputs, tuple[Tensor, ...]]:
        """Runs some tokens of rows; those before are given as keys and values, the prefix.

        Returns:
            The outputs; and the keys and values of the tokens that ran, K then V for each block. Differentiable in
            both, and in the prefix.
        """

    def step(self, steps: Sequence[StepInputs]) -> list[SpanOutputs]:
        """Runs the new tokens of several sessions as one packed forward and appends to their caches.

        All ``steps`` name the same ``blocks``. If it raises, every cache is as long as before.

        Raises:
            CapacityError: If the KV budget cannot hold the new tokens.
        """
