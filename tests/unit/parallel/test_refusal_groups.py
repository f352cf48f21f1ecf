"""Whoever fails is heard by all ranks that would wait, also where the groups of layers do not nest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from swarm_plugins.parallel.refusal import _tell_others

RANKS = 12


@dataclass
class Layer:
    ranks: frozenset[int]
    is_refused: bool = False
    is_open: bool = False
    refuses: bool = False

    def refuse(self) -> None:
        self.refuses = True


def layers_of(rank: int, sizes: Sequence[int], heard_in: int | None) -> list[Layer]:
    """A rank's layers, of which it has heard in one that another has failed, or has failed itself."""
    found = [Layer(frozenset(range(rank // size * size, rank // size * size + size))) for size in sizes]
    if heard_in is not None:
        for layer in found[: heard_in + 1]:
            layer.is_open = True
        found[heard_in].is_refused = True
    _tell_others(found, ValueError("bad batch"))
    return found


@pytest.mark.parametrize("sizes", [[2, 3, 4], [4, 3, 2], [2, 4, 12], [3, 2, 6, 4]], ids=str)
@pytest.mark.parametrize("failing", [0, 2, 5])
def test_no_rank_waits_for_one_that_has_stopped(sizes: list[int], failing: int) -> None:
    stopped = {failing: layers_of(failing, sizes, None)}
    for index, size in enumerate(sizes):
        for start in range(0, RANKS, size):
            group = range(start, start + size)
            absent = [rank for rank in group if rank in stopped and not stopped[rank][index].refuses]
            refusing = [rank for rank in group if rank in stopped and stopped[rank][index].refuses]
            assert len(absent) in (0, size), f"layer {index}: {absent} of {group} have stopped, the others wait"
            if refusing:
                stopped |= {rank: layers_of(rank, sizes, index) for rank in group if rank not in stopped}
    assert len(stopped) > 1
