"""What is announced to a cache without any guessing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from experts_kit import ListCache, pair
from torch.utils.checkpoint import checkpoint

from swarm_plugins.offload.ahead.announce import ReadingAhead


class Told(ListCache):
    """Remembers what it is told."""

    def __init__(self) -> None:
        super().__init__(pair()[0])
        self.guesses: list[tuple[int, list[int]]] = []

    def guess(self, layer: int, experts: Sequence[int]) -> None:
        self.guesses.append((layer, list(experts)))


@pytest.mark.parametrize(
    ("layer", "experts", "expected"),
    [
        pytest.param(1, [0, 2, 3], [(3, [0, 1, 2, 3, 4, 5])], id="most-experts"),
        pytest.param(1, [0, 2], [], id="half-of-them"),
        pytest.param(3, [0, 1, 2, 3, 4, 5], [(4, [0, 1])], id="another-number-in-the-next-layer"),
        pytest.param(4, [0, 1], [], id="last-layer"),
    ],
)
def test_a_layer_that_needs_most_experts_announces_all_of_the_next(
    layer: int, experts: list[int], expected: list[tuple[int, list[int]]]
) -> None:
    cache = Told()
    ReadingAhead(cache, {1: 4, 3: 6, 4: 2}).forward(layer, experts)
    assert cache.guesses == expected


def test_a_backward_pass_announces_what_the_layer_before_has_used() -> None:
    cache = Told()
    ahead = ReadingAhead(cache, {1: 4, 3: 6})
    ahead.backward(3)
    ahead.forward(1, [2])
    ahead.backward(3)
    ahead.backward(1)
    assert cache.guesses == [(1, [2])]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_computed_once_more_in_a_backward_pass_announces_nothing_forward(use_reentrant: bool) -> None:
    cache = Told()
    ahead = ReadingAhead(cache, {1: 4, 3: 6})

    def layer(rows: torch.Tensor) -> torch.Tensor:
        ahead.forward(1, [0, 1, 2])
        return rows.exp()

    result: torch.Tensor = checkpoint(layer, torch.ones(2, requires_grad=True), use_reentrant=use_reentrant)
    assert cache.guesses == [(3, [0, 1, 2, 3, 4, 5])]
    cache.guesses.clear()
    result.sum().backward()
    ahead.backward(3)
    assert cache.guesses == [(1, [0, 1, 2])]
