"""Reads ahead where no guess is needed: in passes over many tokens, and in backward passes.

Many tokens together need most experts of every layer. A backward pass goes through the layers in reverse, and each
needs what it used in the forward pass. Announced experts are read while the layer before still computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from swarm_plugins.offload.interfaces import ExpertCache

_NO_BACKWARD_PASS = -1


class ReadingAhead:
    """Announces to a cache what the next layer of a pass will need, of layers with these numbers of experts."""

    def __init__(self, cache: ExpertCache, num_experts: Mapping[int, int]) -> None:
        self._cache = cache
        self._num_experts = num_experts
        self._after = dict(pairwise(sorted(num_experts)))
        self._before = {after: before for before, after in self._after.items()}
        self._used: dict[int, Sequence[int]] = {}

    def forward(self, layer: int, experts: Sequence[int]) -> None:
        """Notes what a layer needs now; if it needs most of its experts, announces all of the next layer's."""
        self._used[layer] = experts
        after = self._after.get(layer)
        # Inside a backward pass a layer is recomputed, and the layer before it comes next.
        if after is None or torch._C._current_graph_task_id() != _NO_BACKWARD_PASS:
            return
        if 2 * len(experts) > self._num_experts[layer]:
            self._cache.guess(after, range(self._num_experts[after]))

    def backward(self, layer: int) -> None:
        """Announces what the layer before this one has used."""
        before = self._before.get(layer)
        if before is not None and self._used.get(before):
            self._cache.guess(before, self._used[before])
