"""PEFT and generate() on expert-parallel models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from parallel_kit import run_ranks
from parallel_uses import expert_lora, generated, lora_differences, lora_refused

# The ranks are forked from one process that has imported everything.


def test_lora_on_attention_has_the_gradients_of_one_process() -> None:
    for found in run_ranks(4, lora_differences, [{"ep_size": [2, 4]}, {"tp": 2, "ep_size": 4}]):
        assert max(max(one.values()) for one in found) < 1e-4


EXPERT_LORA = {
    2: [{"ep_size": 2}, {"family": "prmoe", "ep_size": [1, 2]}, {"expert_slices": 2, "ep_size": 1}],
    4: [
        {"ep_size": [2, 4]},
        {"family": "qwen3_moe", "ep_size": 4, "ep_implementation": "all_to_all"},
        {"ep_size": 2, "expert_slices": 2},
        {"tp": 2, "ep_size": 4},
        {"tp": 2, "ep_size": 2, "expert_slices": 2},
    ],
}


@pytest.mark.parametrize("world_size", EXPERT_LORA)
def test_lora_on_divided_experts_is_that_of_one_process(world_size: int, tmp_path: Path) -> None:
    cases = EXPERT_LORA[world_size]
    for found in run_ranks(world_size, expert_lora, cases, str(tmp_path)):
        for case, one in zip(cases, found, strict=True):
            assert max(one.values()) < 1e-4, (case, one)


def test_adapters_that_cannot_be_divided_are_refused_on_every_rank() -> None:
    wanted = [
        r"UnsupportedError: model.layers.0.mlp.experts is a ModulesToSaveWrapper.*leave experts out of modules_to_save",
        r"ConfigError: ranks \[[01]\] and rank [01] differ in model, mesh and sizes: give every rank the same",
        r"UnsupportedError: model.layers.0.self_attn.q_proj has an adapter .*: parallelize the model first, then wrap",
    ]
    for found in run_ranks(2, lora_refused):
        for text, pattern in zip(found, wanted, strict=True):
            assert re.match(pattern, text), text


def test_generates_what_one_process_generates() -> None:
    sliced = {"tp": 2, "ep_size": 2, "expert_slices": 2, "family": "prmoe"}
    cases = [{"ep_size": [2, 4]}, {"family": "prmoe"}, {"tp": 2, "ep_size": 4}, sliced]
    for found in run_ranks(4, generated, cases):
        assert all(found), dict(zip(map(str, cases), found, strict=True))
