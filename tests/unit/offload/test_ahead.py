"""What is announced to a cache without any guessing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from experts_kit import ListCache, pair

from swarm_plugins.offload.ahead import ReadingAhead


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
