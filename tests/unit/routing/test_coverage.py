from __future__ import annotations

import pytest

from swarm_plugins.routing.coverage import spread_sample


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


def test_who_has_nothing_that_is_wanted_is_in_no_sample() -> None:
    assert spread_sample({f"peer{index}": () for index in range(5)}, 3) == []
    assert spread_sample({"some": range(2), **{f"peer{index}": () for index in range(5)}}, 3) == ["some"]


class Compared(int):
    """A part that counts how often parts are looked up."""

    looks = 0

    def __hash__(self) -> int:
        Compared.looks += 1
        return int(self)


def test_parts_that_only_one_has_cost_no_look_at_all_others() -> None:
    # Not a time: with each choice all parts were looked at.
    shares = {f"peer{index}": [Compared(index * 50 + part) for part in range(50)] for index in range(400)}
    Compared.looks = 0
    assert len(spread_sample(shares, 64)) == 64
    assert Compared.looks < 10 * 400 * 50
