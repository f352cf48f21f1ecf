"""Trainer(strategy="expert_parallel") and Fabric on gloo processes against one process with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
from expert_parallel_checks import everything
from parallel_kit import run_ranks

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"ep_size": [1, 2]}, {"family": "prmoe", "late": True}),
    ({}, {"lora": True, "manual": True}),
    ({"tp_size": 2}, {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01}),
    ({"expert_slices": 2}, {"precision": "bf16-mixed"}),
]
IDS = ["mixtral", "prmoe-late", "lora-manual", "tp-clip-by-value", "slices-bf16"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, everything, CASES, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)
def test_losses_and_weights_are_those_of_one_process(results: list[dict[str, Any]], index: int) -> None:
    # AdamW turns rounding of bfloat16 into steps of the size of the learning rate.
    allowed = 0.1 if CASES[index][1].get("precision") == "bf16-mixed" else 1e-3
    for one in results:
        assert max(one["equal"][index].values()) < allowed


def test_a_checkpoint_is_one_process_s_and_loads_at_any_size(results: list[dict[str, Any]]) -> None:
    for one in results:
        found = one["resumed"]
        # The same sums in the same order.
        assert found["same"] == 0
        assert found["loaded"] == found["plain"] == found.get("exported", 0) == 0
        assert max(found.values()) < 1e-3


def test_fabric_trains_and_loads_as_torch_does(results: list[dict[str, Any]]) -> None:
    for one in results:
        assert max(one["fabric"].values()) < 1e-3
