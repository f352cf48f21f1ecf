"""A look at every answer that costs next to nothing: by how much it is longer than the input."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_plugins.recent import Recent

_MARGIN = 1.5
"""Factor beyond the smallest and largest ratio seen at which an answer is odd."""
_MIN_SEEN = 4
_MAX_KEYS = 1024
"""Spans whose ratios are remembered; those unused for longest are forgotten."""


@dataclass
class _Range:
    least: float
    most: float
    count: int = 1


def norm_ratio(answer: Tensor, given: Tensor) -> float:
    """Returns the norm of an answer relative to that of what was given, both ``[B, S, D]``."""
    # In float32: the squares of a long input overflow in 16 bits.
    longer, length = (torch.linalg.vector_norm(one, dtype=torch.float32) for one in (answer, given))
    return float(longer / length.clamp_min(1e-30))


class NormRanges:
    """Learns from answers that were found right; an odd one is a reason to check, and no more than that."""

    def __init__(self) -> None:
        self._ranges: Recent[Hashable, _Range] = Recent(_MAX_KEYS)

    def learn(self, key: Hashable, ratio: float) -> None:
        """Widens the range of a kind of call."""
        known = self._ranges[key] = self._ranges.get(key) or _Range(ratio, ratio, 0)
        known.least, known.most, known.count = min(known.least, ratio), max(known.most, ratio), known.count + 1

    def is_odd(self, key: Hashable, ratio: float) -> bool:
        """Returns whether a ratio is far from all that were right."""
        known = self._ranges.get(key)
        if known is None or known.count < _MIN_SEEN:
            return False
        return not known.least / _MARGIN <= ratio <= known.most * _MARGIN
