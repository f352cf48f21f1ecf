from __future__ import annotations

import itertools

import pytest

from swarm_plugins.errors import ConfigError
from swarm_plugins.routing.coverage import block_coverage, choose_span, spread_sample


@pytest.mark.parametrize(
    ("servers", "num_blocks", "span"),
    [
        pytest.param([], 3, range(3), id="nobody-yet"),
        pytest.param([(0, 4, 5.0)], 3, range(4, 7), id="first-gap"),
        pytest.param([(0, 4, 5.0), (4, 8, 1.0)], 2, range(4, 6), id="weakest"),
        pytest.param([(0, 3, 5.0), (5, 8, 5.0)], 3, range(2, 5), id="covers-the-hole"),
        pytest.param([(0, 8, 1.0)], 8, range(8), id="whole-model"),
    ],
)
def test_takes_what_the_swarm_lacks_most(servers: list[tuple[int, int, float]], num_blocks: int, span: range) -> None:
    assert choose_span(block_coverage(8, servers), num_blocks) == span


def test_choice_is_least_by_sorted_throughputs_whatever_the_coverage() -> None:
    for coverage in itertools.product((0.0, 1.0, 2.0), repeat=5):
        chosen = choose_span(coverage, 2)
        best = min(sorted(coverage[start : start + 2]) for start in range(4))
        assert sorted(coverage[block] for block in chosen) == best


def test_announced_span_beyond_the_model_does_no_harm() -> None:
    assert block_coverage(3, [(-5, 2, 1.0), (2, 100, 2.0)]) == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("num_blocks", [0, 4])
def test_impossible_length_is_refused(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=f"cannot serve {num_blocks} blocks: expected 1 to 3"):
        choose_span([0.0] * 3, num_blocks)


def test_a_small_swarm_is_asked_as_a_whole() -> None:
    assert sorted(spread_sample({"a": range(2), "b": range(2), "c": range(2, 4)}, 3)) == ["a", "b", "c"]


@pytest.mark.parametrize("width", [1, 3])
def test_a_sample_holds_every_block_that_the_swarm_holds(width: int) -> None:
    crowd = {f"crowd{index}": range(1) for index in range(500)}
    rare = {f"rare{start}": range(start, start + width) for start in range(1, 40)}
    chosen = spread_sample(crowd | rare, 64)
    assert len(chosen) == len(set(chosen)) == 64
    held = {block for peer in chosen for block in (crowd | rare)[peer]}
    assert held == set(range(39 + width))


def test_servers_that_hold_the_same_are_chosen_at_random() -> None:
    spans = {f"peer{index}": range(4) for index in range(1000)}
    # Two samples of 10 of 1000 are the same ten with a chance below 1e-20.
    assert set(spread_sample(spans, 10)) != set(spread_sample(spans, 10))
