"""The seam between a server and the blocks it runs: a runner of a span."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarm_plugins.block_io import PAGE_TOKENS, SpanInputs, SpanOutputs
from swarm_plugins.blocks.kv import BlockKV, KVCache
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
        """Bytes that one token of one row takes in the caches of all blocks."""
        return self.kv_bytes_of(self.kv_layouts)[0]

    @property
    def kv_row_bytes(self) -> int:
        """Bytes that one row takes there at any length: its states, and those before the last step."""
        return self.kv_bytes_of(self.kv_layouts)[1]

    def kv_bytes_of(self, blocks: Iterable[int]) -> tuple[int, int]:
        """Returns what one token of one row, and what the row itself takes in the caches of those blocks held here."""
        layouts = [self.kv_layouts[block] for block in blocks if block in self.kv_layouts]
        return sum(layout.token_bytes for layout in layouts), 2 * sum(layout.row_bytes for layout in layouts)

    @property
    def kv_row_tokens(self) -> int:
        """Tokens, as `kv_tokens` counts them, that each row after the first takes at any length."""
        if self.kv_token_bytes:
            return -(-self.kv_row_bytes // self.kv_token_bytes)
        return self.max_positions if self.kv_row_bytes else 0

    def kv_tokens(self, num_bytes: int) -> int:
        """Returns how many tokens of one row fit into ``num_bytes``, in whole pages.

        If a row takes the same memory at any length, each one that fits counts as the model's longest. A token that
        takes none counts as a byte.
        """
        if self.kv_token_bytes:
            return max(0, num_bytes - self.kv_row_bytes) // (self.kv_token_bytes * PAGE_TOKENS) * PAGE_TOKENS
        return num_bytes // self.kv_row_bytes * self.max_positions if self.kv_row_bytes else num_bytes


@dataclass(frozen=True, kw_only=True)
class StepInputs(SpanInputs):
    """New tokens of one session, packed with other sessions'; a prefix is in its cache already."""

    cache: KVCache
    goes_on: bool = False
    """Whether they are a further part of the session's last step, and are taken back with it."""


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
