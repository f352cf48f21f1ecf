"""Expert parallelism on several gloo processes against one process."""

from __future__ import annotations

import pytest
from parallel_checks import equal_to_one_process
from parallel_kit import run_ranks

ANY_WORLD = [
    {"ep_size": "auto"},
    {"family": "qwen3_moe", "ep_size": [1, 2]},
    {"family": "olmoe", "ep_size": 2, "ep_implementation": "all_to_all"},
    {"ep_size": 2, "ep_implementation": "hierarchical_all_to_all", "ranks_per_node": 2},
    {"ep_size": 1, "expert_slices": 2},
    {"family": "qwen3_moe", "tp": 2, "ep_size": 2, "ep_implementation": "coordinated_all_to_all"},
    {"family": "olmoe", "tp": 2, "ep_size": 1, "expert_slices": 2},
    {"tp": 2, "ep_size": 2, "ep_implementation": "all_reduce"},
]
FOUR = [
    {"family": "olmoe", "ep_size": {0: 4, 1: 2}},
    {"ep_size": 4, "ep_implementation": "hierarchical_all_to_all", "ranks_per_node": 2},
    {"ep_size": 2, "expert_slices": 2},
    {"tp": 2, "ep_size": 4},
    {"tp": 2, "ep_size": 4, "ep_implementation": "coordinated_all_to_all"},
    {"tp": 2, "ep_size": 2, "expert_slices": 2, "ep_implementation": "coordinated_all_to_all"},
    {"tp": 2, "ep_size": [2, 4], "ep_implementation": "hierarchical_all_to_all", "ranks_per_node": 2},
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_logits_and_gradients_are_those_of_one_process(world_size: int) -> None:
    cases = ANY_WORLD + (FOUR if world_size == 4 else [])
    for errors in run_ranks(world_size, equal_to_one_process, cases):
        for case, one in zip(cases, errors, strict=True):
            assert max(one.values()) < 1e-4, (case, one)
