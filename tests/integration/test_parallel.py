"""Expert parallelism on several gloo processes against one process."""

from __future__ import annotations

import pytest
from parallel_checks import equal_to_one_process
from parallel_kit import run_ranks


@pytest.mark.parametrize("world_size", [2, 4])
def test_logits_and_gradients_are_those_of_one_process(world_size: int) -> None:
    cases = [
        ("mixtral", "auto", "all_to_all"),
        ("qwen3_moe", [1, 2], "all_to_all"),
        ("olmoe", {0: 2, 1: world_size}, "all_to_all"),
    ]
    for errors in run_ranks(world_size, equal_to_one_process, cases):
        for case, one in zip(cases, errors, strict=True):
            assert max(one.values()) < 1e-4, (case, one)
