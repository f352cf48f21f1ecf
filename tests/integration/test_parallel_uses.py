"""PEFT and generate() on expert-parallel models."""

from __future__ import annotations

import re

import pytest
from parallel_kit import run_ranks
from parallel_uses import generated, lora_gradients, lora_refused

# The ranks are forked from one process that has imported everything.
pytestmark = pytest.mark.xdist_group("parallel")


@pytest.mark.parametrize("case", [{"ep_size": [2, 4]}, {"tp": 2, "ep_size": 4}], ids=["data", "tensor"])
def test_lora_on_attention_has_the_gradients_of_one_process(case: dict[str, int]) -> None:
    assert max(run_ranks(4, lora_gradients, case)) < 1e-4


def test_adapters_on_divided_experts_are_refused() -> None:
    for experts, whole in run_ranks(2, lora_refused):
        assert re.match(r"UnsupportedError: model.layers.0.mlp.experts is wrapped by ParamWrapper", experts), experts
        assert re.match(r"UnsupportedError: PeftModel is not a transformers model: parallelize the model first", whole)


@pytest.mark.parametrize(
    ("case", "own_prompts"),
    [
        ({"ep_size": [2, 4]}, True),
        ({"family": "prmoe"}, True),
        ({"tp": 2, "ep_size": 4}, False),
        ({"tp": 2, "ep_size": 2, "expert_slices": 2, "family": "prmoe"}, False),
    ],
    ids=["own-prompts", "prmoe", "shared-batches", "sliced"],
)
def test_generates_what_one_process_generates(case: dict[str, int], own_prompts: bool) -> None:
    assert all(run_ranks(4, generated, case, own_prompts))
