"""Trainer(strategy="expert_parallel") and Fabric on gloo processes against one process with the whole batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from expert_parallel_checks import equal_to_one_process, resumed
from expert_parallel_failures import everything, rank_dies
from parallel_kit import run_ranks

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"ep_size": [1, 2]}, {"family": "prmoe", "late": True, "precision": "64-true", "experts": "eager"}),
    ({}, {"lora": True, "manual": True}),
    ({"tp_size": 2}, {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01}),
    ({}, {"raw": True}),
    ({"expert_slices": 2}, {"precision": "bf16-mixed"}),
]
IDS = ["mixtral", "prmoe-late-float64", "lora-manual", "tp-clip-by-value", "raw", "slices-bf16"]


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
        check_resumed(one["resumed"])


def check_resumed(found: dict[str, float]) -> None:
    # The same sums in the same order.
    assert found["same"] == 0
    assert found["loaded"] == found["plain"] == found.get("exported", 0) == 0
    assert max(found.values()) < 1e-3


def test_a_model_loaded_in_parts_trains_as_a_whole_one(results: list[dict[str, Any]]) -> None:
    for one in results:
        refused = one["parts"].pop("refused")
        assert max(one["parts"].values()) < 1e-3
        assert re.match(r"ConfigError: the model lies on a mesh with 1 along 'tp', .* tp_size 2", refused)


def test_fabric_trains_and_loads_as_torch_does(results: list[dict[str, Any]]) -> None:
    for one in results:
        assert max(one["fabric"].values()) < 1e-3


def test_an_adapter_on_experts_is_saved_and_loaded_as_any_other(tmp_path: Path) -> None:
    for found in run_ranks(2, resumed, tmp_path, lora=True):
        check_resumed(found)


def test_four_ranks_too() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"ep_size": [2, 4]}, {"lora": True}),
        ({"tp_size": 2}, {"family": "qwen3_moe"}),
        ({"ep_size": 2, "expert_slices": 2}, {}),
        ({"ep_size": 4, "ep_implementation": "hierarchical_all_to_all", "ranks_per_node": 2}, {"manual": True}),
    ]
    for errors in run_ranks(4, equal_to_one_process, cases):
        assert max(value for one in errors for value in one.values()) < 1e-3


def test_what_cannot_work_is_refused_on_every_rank(results: list[dict[str, Any]]) -> None:
    both = {
        "size": r"ep_size does not divide .* 2 ranks: layer 0 has 8 experts, ep_size 3, valid are \[1, 2\]",
        "tp": r"tp_size 3 does not divide 2 ranks: valid are \[1, 2\]",
        "no mixture": r"Dense holds no Hugging Face model.*configure_model",
        "one rank's module": r"differ in|refused",
        "batch norm": r"sync_batchnorm=True has no meaning",
        "batches": r"the ranks have \[3, 2\] predict batches.*limit_predict_batches=2",
        "after an error": r"no checkpoint can be made after an error",
        "then": r"2 losses",
    }
    for one in results:
        for name, message in both.items():
            assert re.search(message, one["refused"][name]), (name, one["refused"][name])


def test_a_lost_rank_ends_the_others_with_one_sentence() -> None:
    said, seconds = run_ranks(2, rank_dies, may_die=(1,))[0]
    assert said.startswith("TransportError: rank 0 lost its group in ")
    assert seconds < 120
