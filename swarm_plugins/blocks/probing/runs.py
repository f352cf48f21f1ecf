"""Runs a model in ways that it may not be made for, to learn from what comes out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from swarm_plugins.blocks.calls import Call
from swarm_plugins.blocks.cut_model import CutModel
from swarm_plugins.blocks.kv import KVCache, KVPool
from swarm_plugins.blocks.layout import BlockKV
from swarm_plugins.blocks.past import Past
from swarm_plugins.blocks.runner import StepInputs

SEED = 0x5EED
FAULTS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError)
"""What a model raises that is run in a way that it is not made for."""


def run(cut: CutModel, hidden: Tensor, past: Past | None = None, ids: Tensor | None = None) -> Tensor:
    """Returns the output of all blocks of a span."""
    call = Call(blocks=cut.blocks, table=cut.table(cut.blocks), attention=cut.attention)
    return cut.run(call, hidden, past=past, ids=ids)


def random(cut: CutModel, generator: torch.Generator, num_rows: int, num_tokens: int) -> Tensor:
    """Returns random hidden states, ``[rows, tokens, D]``."""
    shape = num_rows, num_tokens, cut.hidden_size
    return torch.randn(shape, generator=generator, device=generator.device).to(cut.device, cut.dtype)


def distance(one: Tensor, two: Tensor) -> float:
    """Returns how far two tensors are apart, relative to the size of the first."""
    return float((one - two).float().norm() / one.float().norm().clamp(min=1e-6))


class Session:
    """One session of a model, whose memory is not counted."""

    def __init__(self, cut: CutModel, layouts: Mapping[int, BlockKV], num_rows: int = 1) -> None:
        self._cut = cut
        self._cache = KVCache(KVPool(1 << 62), layouts, cut.blocks, num_rows, cut.device)

    def step(self, hidden: Tensor) -> StepInputs:
        """Returns a step that has room in the cache."""
        self._cache.reserve(hidden.shape[1])
        return StepInputs(cache=self._cache, blocks=self._cut.blocks, hidden=hidden)

    def run(self, hidden: Tensor) -> Tensor:
        output = self._cut.step(self.step(hidden)).hidden
        self._cache.advance(hidden.shape[1])
        return output
