"""The seam between a server and the blocks it runs: a runner of a span, and the caches of its sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from swarm_plugins.block_io import SpanInputs, SpanOutputs

__all__ = ["SessionCache", "SpanRunner", "StepInputs"]


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
class StepInputs(SpanInputs):
    """New tokens of one session, to be packed with those of others; a prefix is in its cache already."""

    cache: SessionCache


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
