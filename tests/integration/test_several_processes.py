"""Trainer(strategy="swarm", devices=2) and Fabric against one process with the whole batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import several_checks as checks
import trainer_kit
from parallel_kit import run_ranks

from swarm_plugins.local_hub import LocalHub
from swarm_plugins.testing.models import save_tiny

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
# Fixtures.
model, swarm, peers = trainer_kit.model, trainer_kit.swarm, trainer_kit.peers

MEMORY = {"offload": "none"}
OFFLOADED = {"offload": "fast=100KB"}
ROUNDING = 1e-6
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (OFFLOADED, {}),
    (OFFLOADED, {"method": "prompts"}),
    (MEMORY, {"manual": True}),
    (MEMORY, {"gradient_clip_algorithm": "value", "gradient_clip_val": 1e-3}),
    (MEMORY, {"precision": "bf16-mixed"}),
]
IDS = ["offloaded", "prompts", "manual", "clip-by-value", "bf16-mixed"]


def test_two_processes_are_equal_to_one_with_the_whole_batch(model: Path, peers: list[str]) -> None:
    for found in run_ranks(2, checks.compared, model, {"initial_peers": peers}):
        assert found["first"] == 0
        assert max(found.values()) < ROUNDING


@pytest.fixture(scope="module")
def results(model: Path) -> list[list[dict[str, float]]]:
    return run_ranks(2, checks.all_compared, model, CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)
def test_so_are_other_places_adapters_and_precisions(results: list[list[dict[str, float]]], index: int) -> None:
    # A product of matrices in bfloat16 rounds otherwise with other rows beside it.
    allowed = 1e-2 if CASES[index][1].get("precision") == "bf16-mixed" else ROUNDING
    for one in results:
        assert one[index]["first"] == 0
        assert max(one[index].values()) < allowed


def test_gradients_are_means_and_what_no_process_uses_has_none() -> None:
    for found in run_ranks(2, checks.averaged):
        assert [None if one is None else one.tolist() for one in found] == [[2.0] * 3, [0.5] * 3, None, [2.0] * 3]


def test_three_processes_too(model: Path) -> None:
    # Batches of 2 rows instead of 8: those of one process are no multiple of three.
    for found in run_ranks(3, checks.odd_data, model, MEMORY):
        assert found == {"seven rows": 2, "one row": 1}


def test_a_checkpoint_is_one_process_s_and_is_resumed_by_any_number(model: Path, tmp_path: Path) -> None:
    for found in run_ranks(2, checks.resumed, model, OFFLOADED, tmp_path):
        assert found["files"] == ["one.ckpt", "several.ckpt"]
        assert found["names"]
        assert found["same"] == 0
        assert max(found["by one"], found["of one"]) < ROUNDING


def test_the_first_one_publishes(model: Path, tmp_path: Path) -> None:
    with LocalHub() as hub:
        assert run_ranks(2, checks.published, model, MEMORY, tmp_path, hub.endpoint) == [1, 0]


def test_fabric_s_are_equal_too(model: Path, tmp_path: Path) -> None:
    for found in run_ranks(2, checks.by_fabric, model, OFFLOADED, tmp_path):
        assert found["weights"] < ROUNDING


def test_what_cannot_work_is_refused_in_every_process(model: Path, tmp_path: Path) -> None:
    other = save_tiny("mixtral", tmp_path / "other", seed=1)
    both = {
        "adapters": r"ConfigError: ranks \[[01]\] and rank [01] differ in model or adapter: give every rank the same",
        "models": r"ConfigError: ranks \[[01]\] and rank [01] differ in model or adapter",
        "batches": r"ConfigError: the ranks have \[1, 2\] train batches.*averaged.*limit_train_batches=1",
        "one place": r"ConfigError: .*quick=1",
        "then": r"6 losses",
    }
    for found in run_ranks(2, checks.refusals, model, MEMORY, other):
        for name, message in both.items():
            assert re.search(message, found[name]), (name, found[name])


@pytest.mark.parametrize("hangs", [False, True], ids=["dies", "hangs"])
def test_a_lost_process_ends_the_others_with_one_sentence(model: Path, hangs: bool) -> None:
    said = run_ranks(2, checks.loses_one, model, MEMORY, hangs, may_die=(1,))[0]
    assert said.startswith("TransportError: rank 0 lost its group in averaging gradients")
