"""What each move of a server would do to the coverage of blocks, for all servers and places at once.

Letters: ``M`` servers, ``m`` of them that may move, ``N`` blocks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swarm_plugins.borders import NO_TIES

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_SQUARINGS = 4
"""The soft minimum is a power mean with the exponent ``-2 ** _SQUARINGS``."""
_CLAMP = 0.3
"""Coverage below this share of the slowest block's counts as this share: sums of larger powers would not be exact."""


class Step(NamedTuple):
    """A move of one server."""

    server: int
    start: int
    num_gaps: int
    """Blocks without a server afterwards."""
    cost: float
    """Falls as the soft minimum of the coverage rises; comparable between steps from the same table."""


class SpanTable:
    """Spans of servers and the coverage of blocks that they add up to.

    Args:
        starts: First blocks ``[M]``.
        lengths: Blocks of each server ``[M]``.
        rates: Tokens per second ``[M]``, above 0.
        are_relied_on: Which servers serve already ``[M]``: one of these may not leave a block that no other holds.
        may_overlap: Which servers serve their old span until they have the new one ``[M]``.
        num_blocks: Blocks of the model.
        tied: Blocks at which no span begins or ends.
        least: Coverage that costs are relative to. None: that of the slowest block.
    """

    def __init__(
        self,
        starts: Integers,
        lengths: Integers,
        rates: Floats,
        are_relied_on: NDArray[np.bool_],
        may_overlap: NDArray[np.bool_],
        num_blocks: int,
        tied: Collection[int] = NO_TIES,
        least: float | None = None,
    ) -> None:
        self.starts, self.lengths, self.rates = starts, lengths, rates
        self._are_relied_on, self._may_overlap = are_relied_on, may_overlap
        self._blocks = np.arange(num_blocks)
        self._tied = tied
        self._is_border = np.isin(np.arange(num_blocks + 1), list(tied), invert=True)  # [N + 1]
        self._holds = (starts[:, None] <= self._blocks) & (self._blocks < (starts + lengths)[:, None])  # [M, N]
        self.coverage: Floats = rates @ self._holds  # [N]
        self._counts = self._holds.sum(axis=0)  # [N]
        self._num_relied_on = (self._holds & are_relied_on[:, None]).sum(axis=0)  # [N]
        covered = self.coverage[self._counts > 0]
        self._least = least or (float(covered.min()) if len(covered) else 1.0)

    @property
    def num_gaps(self) -> int:
        """Blocks without a server."""
        return int((self._counts == 0).sum())

    @property
    def cost(self) -> float:
        """What the steps' costs are compared with."""
        return float(_penalty(self.coverage, self._least).sum())

    def share(self, index: int) -> float:
        """Returns a server's share of the whole capacity: by what it raises a balanced swarm's throughput."""
        area = self.rates * self.lengths
        return float(area[index] / area.sum())

    def gain(self, step: Step) -> float:
        """Returns by which share a step raises the soft minimum."""
        return float((self.cost / step.cost) ** (0.5**_SQUARINGS) - 1)

    def after(self, step: Step) -> SpanTable:
        """Returns the table after a step; costs stay comparable."""
        starts = self.starts.copy()
        starts[step.server] = step.start
        return SpanTable(
            starts,
            self.lengths,
            self.rates,
            self._are_relied_on,
            self._may_overlap,
            len(self._blocks),
            self._tied,
            self._least,
        )

    def best_steps(self, movable: Sequence[int], most: int = 1) -> list[Step]:
        """Returns the best steps of some servers: those that leave the fewest gaps, at the least cost.

        No step leaves a block that no other server holds. At a tie the first server and the first block win.
        """
        gaps, costs = self._outcomes(movable)
        fewest = int(gaps.min())
        costs = np.where(gaps == fewest, costs, math.inf).ravel()
        order = [int(costs.argmin())] if most == 1 else [int(one) for one in np.argsort(costs, kind="stable")[:most]]
        width = len(self._blocks) + 1
        return [
            Step(movable[place // width], place % width, fewest, float(costs[place]))
            for place in order
            if math.isfinite(costs[place]) and fewest <= len(self._blocks)
        ]

    def _outcomes(self, movable: Sequence[int]) -> tuple[Integers, Floats]:
        """Returns gaps and cost after each server moved to each start ``[m, N + 1]``; N + 1 gaps: not allowed."""
        num_blocks = len(self._blocks)
        rates, holds = self.rates[movable, None], self._holds[movable]
        without = np.where(holds, self.coverage - rates, self.coverage)  # [m, N]
        lacks = self._counts - holds == 0  # [m, N]
        is_bound = holds & self._are_relied_on[movable, None] & (self._num_relied_on - holds == 0)  # [m, N]
        left = _penalty(without, self._least)
        saved = left - _penalty(without + rates, self._least)
        starts = np.arange(num_blocks + 1)
        ends = starts + self.lengths[movable, None]  # [m, N + 1]
        fits = ends <= num_blocks
        ends = np.minimum(ends, num_blocks)
        fits &= self._is_border & self._is_border[ends]
        keeps = np.where(self._may_overlap[movable, None], _window(is_bound, ends), 0.0)
        allowed = fits & (keeps == is_bound.sum(axis=1, keepdims=True)) & (self.starts[movable, None] != starts)
        gaps = lacks.sum(axis=1, keepdims=True) - _window(lacks, ends).astype(np.int64)
        # Differences of rounded sums: kept above 0, and equal ones equal.
        whole = left.sum(axis=1, keepdims=True)
        costs = np.maximum(np.round((whole - _window(saved, ends)) / whole, 12) * whole, 1e-6)
        return np.where(allowed, gaps, num_blocks + 1), costs


def _window(values: NDArray[np.generic], ends: Integers) -> Floats:
    """Returns the sums of ``[m, N]`` values from each start, 0 to N, to its end ``[m, N + 1]``."""
    sums = np.zeros((values.shape[0], values.shape[1] + 1))
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return np.take_along_axis(sums, ends, axis=1) - sums


def _penalty(coverage: Floats, least: float) -> Floats:
    """Returns ``(least / coverage) ** 2 ** _SQUARINGS``, bounded."""
    powers = least / np.maximum(coverage, _CLAMP * least)
    for _ in range(_SQUARINGS):
        powers = powers * powers
    return powers
