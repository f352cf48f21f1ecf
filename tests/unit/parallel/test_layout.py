"""Sizes of expert-parallel groups: what is valid, what is refused, and with which words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_plugins.errors import ConfigError
from swarm_plugins.parallel.layout import EpSize, ExpertLayer, Placement, layer_index, plan_layers, undivided_text

PYRAMID = [ExpertLayer(f"model.layers.{index}.mlp.experts", index, count) for index, count in ((1, 4), (3, 8))]


def sizes(ep_size: EpSize, **placement: int) -> list[tuple[int, int]]:
    layouts = plan_layers(PYRAMID, 4, ep_size, Placement(**{"world_size": 8, **placement}))
    return [(one.ep_size, one.num_replicas) for one in layouts]


@pytest.mark.parametrize(
    ("ep_size", "wanted"),
    [
        pytest.param("auto", [(4, 2), (8, 1)], id="auto"),
        pytest.param(2, [(2, 4), (2, 4)], id="one-size"),
        pytest.param([1, 2, 1, 8], [(2, 4), (8, 1)], id="one-per-layer"),
        pytest.param([0, 4, 0, 4], [(4, 2), (4, 2)], id="dense-layers-as-zero"),
        pytest.param({1: 1, 3: 4}, [(1, 8), (4, 2)], id="by-index"),
    ],
)
def test_a_size_per_layer(ep_size: EpSize, wanted: list[tuple[int, int]]) -> None:
    assert sizes(ep_size) == wanted


def test_layers_that_no_rank_shares_are_named() -> None:
    def text(world_size: int) -> str:
        return undivided_text(plan_layers(PYRAMID, 4, "auto", Placement(world_size=world_size)))

    assert text(3).startswith("each of 3 ranks holds all experts of the layers 1 (4 experts), 3 (8 experts): ")
    assert [text(world_size) for world_size in (1, 2, 8)] == ["", "", ""]


def test_slices_leave_fewer_ranks_for_whole_experts() -> None:
    assert sizes("auto", expert_slices=2) == [(4, 1), (4, 1)]


def test_groups_of_whole_experts_are_unions_of_groups_that_share_a_batch() -> None:
    assert Placement(world_size=8, tp_size=4).valid_sizes(8) == [1, 4, 8]
    assert Placement(world_size=8, tp_size=4, expert_slices=4).valid_sizes(8) == [1, 2]


@pytest.mark.parametrize(
    ("ep_size", "placement", "message"),
    [
        pytest.param(8, {}, r"8 ranks: layer 1 has 4 experts, ep_size 8, valid are \[1, 2, 4\]", id="experts"),
        pytest.param(
            3, {}, r"layer 1 .* ep_size 3, .*; layer 3 has 8 experts, ep_size 3, valid are \[1, 2, 4, 8\]", id="both"
        ),
        pytest.param(2, {"tp_size": 4}, r"8 ranks, 4 to a batch: layer 1 .* valid are \[1, 4\]", id="shared-batch"),
        pytest.param(-2, {}, r"ep_size -2", id="negative"),
        pytest.param("most", {}, r"invalid ep_size 'most': expected an int, one per layer, or 'auto'", id="word"),
        pytest.param([2, 2], {}, r"ep_size has 2 entries for 4 decoder layers", id="too-few"),
        pytest.param([2, 2, 1, 2], {}, r"above 1 for layers \[0\], which have no experts", id="dense"),
        pytest.param({1: 2}, {}, r"names layers \[1\], but the layers with experts are \[1, 3\]", id="missing-layer"),
        pytest.param(1, {"expert_slices": 3}, r"3 does not divide 8 ranks: valid are \[1, 2, 4, 8\]", id="slices"),
        pytest.param(1, {"expert_slices": 2, "tp_size": 4}, r"valid are 1 and 4", id="slices-of-a-shared-batch"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(ep_size: EpSize, placement: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sizes(ep_size, **placement)


@given(st.integers(1, 64), st.integers(1, 32))
def test_valid_sizes_are_the_common_divisors(num_experts: int, world_size: int) -> None:
    common = [size for size in range(1, world_size + 1) if world_size % size == num_experts % size == 0]
    assert Placement(world_size).valid_sizes(num_experts) == common


def test_the_layer_is_the_number_in_the_name() -> None:
    assert layer_index("model.layers.12.mlp.experts") == 12
    with pytest.raises(ConfigError, match=r"'mixer.experts' belong to no numbered decoder layer"):
        layer_index("mixer.experts")
