"""What goes into a span of blocks and what comes out.

Shapes: ``B`` batch, ``S`` new tokens, ``L`` cached + new tokens, ``D`` hidden width, ``P`` prefix length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from swarm_plugins.adapter_spec import AdapterSpec

__all__ = ["AdapterUse", "LoadedAdapter", "SessionCache", "SpanInputs", "SpanOutputs", "SpanRunner", "StepInputs"]


@dataclass(frozen=True, kw_only=True)
class LoadedAdapter:
    """An adapter whose structure and tensors have been checked against the span it is used on."""

    digest: str
    spec: AdapterSpec
    tensors: tuple[Tensor, ...]
    """In the order of ``spec.tensor_shapes()``."""


@dataclass(frozen=True, kw_only=True)
class AdapterUse:
    """Which adapters apply to which rows of a batch."""

    adapters: tuple[LoadedAdapter, ...] = ()
    rows: tuple[int, ...] | None = None
    """For each row the index of its one adapter, -1 for none. None: all adapters on all rows."""
    dropout_seed: int | None = None
    """Seed of the dropout; None: no dropout (evaluation)."""


@dataclass(frozen=True, kw_only=True)
class SpanInputs:
    """One forward without a session."""

    blocks: range
    """Global block indices to run, inside the span."""
    hidden: Tensor
    """``[B, S, D]``."""
    position_ids: Tensor | None = None
    """``[B or 1, S]``."""
    attention_mask: Tensor | None = None
    """``[B, P + S]``, bool."""
    adapters: AdapterUse = field(default_factory=AdapterUse)
    prefix: tuple[Tensor, ...] = ()
    """K then V for each block, ``[B, kv heads, P, head width]``."""
    collect_hidden: bool = False
    collect_router: bool = False


@dataclass(frozen=True, kw_only=True)
class SpanOutputs:
    """The result of a forward or a session step."""

    hidden: Tensor
    """``[B, S, D]``."""
    hidden_states: tuple[Tensor, ...] = ()
    """Outputs of all blocks but the last, if asked for."""
    router_logits: tuple[Tensor, ...] = ()
    """``[B * S, experts]`` for each mixture-of-experts block, if asked for."""
    router_blocks: tuple[int, ...] = ()
    """The blocks that ``router_logits`` belong to."""


class SessionCache(Protocol):
    """Keys and values of one session, for the blocks it was opened with."""

    @property
    def batch_size(self) -> int:
        """Rows."""
        ...

    @property
    def length(self) -> int:
        """Cached tokens per row, padding included."""
        ...

    @property
    def capacity(self) -> int:
        """Tokens per row that memory is held for."""
        ...

    def crop(self, length: int) -> None:
        """Keeps the first ``length`` tokens."""
        ...

    def select(self, indices: Sequence[int]) -> None:
        """Makes row ``i`` the old row ``indices[i]``; the batch size may change."""
        ...

    def fork(self) -> SessionCache:
        """Returns an independent copy."""
        ...

    def close(self) -> None:
        """Gives the memory back to the budget. Idempotent."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """New tokens of one session, to be packed with those of others."""

    cache: SessionCache
    blocks: range
    hidden: Tensor
    """``[B, S, D]``."""
    position_ids: Tensor | None = None
    """``[B or 1, S]``."""
    attention_mask: Tensor | None = None
    """``[B, L]``, bool, L = cached + S."""
    adapters: AdapterUse = field(default_factory=AdapterUse)
    collect_hidden: bool = False
    collect_router: bool = False


class SpanRunner(Protocol):
    """Runs consecutive blocks of a model. All calls come from one thread."""

    start: int
    end: int

    def new_cache(self, batch_size: int, blocks: range, prefix: Sequence[Tensor] = ()) -> SessionCache:
        """Opens an empty cache, or one that starts with ``prefix`` (K then V for each block).

        Raises:
            CapacityError: If the KV budget has no room for a first page.
        """
        ...

    def forward(self, inputs: SpanInputs) -> SpanOutputs:
        """Runs ``inputs.blocks``; differentiable where gradients are enabled."""
        ...

    def step(self, steps: Sequence[StepInputs]) -> list[SpanOutputs]:
        """Runs the new tokens of several sessions as one packed forward and appends to their caches.

        All ``steps`` name the same ``blocks``. If it raises, every cache is as long as before.

        Raises:
            CapacityError: If the KV budget cannot hold the new tokens.
        """
        ...
