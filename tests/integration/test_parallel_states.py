"""State dicts, checkpoints and gradient norms of expert-parallel models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from parallel_kit import run_ranks
from parallel_states import clipped, gathered, held_bytes, mismatch, saved_and_loaded, scattered

# The ranks are forked from one process that has imported everything.
pytestmark = pytest.mark.xdist_group("parallel")

LAYOUTS = [
    {"ep_size": [2, 4]},
    {"family": "prmoe", "ep_size": "auto"},
    {"ep_size": 2, "expert_slices": 2},
    {"family": "qwen3_moe", "tp": 2, "ep_size": 4},
    {"tp": 2, "ep_size": 2, "expert_slices": 2},
]


def test_the_gathered_state_dict_is_that_of_the_model() -> None:
    assert run_ranks(4, gathered, LAYOUTS)[0] == [[]] * len(LAYOUTS)


@pytest.mark.parametrize(
    ("first", "second"),
    [({"ep_size": 4}, {"ep_size": [1, 2]}), ({"ep_size": 2, "expert_slices": 2}, {"tp": 2, "ep_size": 4})],
    ids=["sizes", "slices"],
)
def test_a_state_dict_loads_at_another_group_size(first: dict[str, int], second: dict[str, int]) -> None:
    assert all(run_ranks(4, scattered, first, second))


def test_a_saved_checkpoint_loads_at_another_group_size(tmp_path: Path) -> None:
    assert max(max(found) for found in run_ranks(4, saved_and_loaded, str(tmp_path))) < 1e-5


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_gradients_are_clipped_by_the_norm_of_all_ranks(case: dict[str, int]) -> None:
    for right, norm, after in run_ranks(4, clipped, case):
        assert norm == pytest.approx(right, rel=1e-4)
        assert after == pytest.approx(min(0.5, right), rel=1e-3)


def test_a_rank_keeps_only_its_experts_in_memory() -> None:
    for before, after in run_ranks(2, held_bytes):
        assert after == before // 2


def test_a_state_dict_of_another_model_is_refused_on_every_rank() -> None:
    answers = run_ranks(2, mismatch)
    assert re.match(r"CheckpointError: the state dict does not fit .*: 9 unknown, such as model.layers.2", answers[0])
    assert re.match(r"ConfigError: rank 0 refused: the state dict does not fit", answers[1])
