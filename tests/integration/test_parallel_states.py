"""State dicts and checkpoints of expert-parallel models."""

from __future__ import annotations

import re
from pathlib import Path

from parallel_checks import mixture
from parallel_kit import run_ranks
from parallel_states import (
    gathered,
    held_bytes,
    loaded_bytes,
    loaded_in_parts,
    mismatch,
    not_loaded,
    saved_and_loaded,
    scattered,
)

from swarm_plugins.testing import tiny_model

# The ranks are forked from one process that has imported everything.

LAYOUTS = [
    {"ep_size": [2, 4]},
    {"family": "prmoe", "ep_size": "auto"},
    {"ep_size": 2, "expert_slices": 2},
    {"family": "qwen3_moe", "tp": 2, "ep_size": 4},
    {"tp": 2, "ep_size": 2, "expert_slices": 2},
]


def test_the_gathered_state_dict_is_that_of_the_model() -> None:
    assert run_ranks(4, gathered, LAYOUTS)[0] == [[]] * len(LAYOUTS)


def test_a_state_dict_loads_at_another_group_size() -> None:
    sliced = {"ep_size": 2, "expert_slices": 2}
    pairs = [({"ep_size": 4}, {"ep_size": [1, 2]}), (sliced, {"tp": 2, "ep_size": 4}), ({"ep_size": 4}, sliced)]
    assert max(max(found) for found in run_ranks(4, scattered, pairs)) < 1e-5


def test_a_saved_checkpoint_loads_at_another_group_size(tmp_path: Path) -> None:
    assert max(max(found) for found in run_ranks(4, saved_and_loaded, str(tmp_path))) < 1e-5


def test_a_rank_keeps_only_its_experts_in_memory() -> None:
    for before, after in run_ranks(2, held_bytes):
        assert after == before // 2


def test_a_state_dict_of_another_model_is_refused_on_every_rank() -> None:
    answers = run_ranks(2, mismatch)
    assert re.match(r"CheckpointError: the state dict does not fit .*: 9 unknown, such as model.layers.2", answers[0])
    assert re.match(r"ConfigError: rank 0 refused: the state dict does not fit", answers[1])


def test_each_rank_loads_its_part_of_a_checkpoint(tmp_path: Path) -> None:
    families = {"mixtral": False, "qwen3_moe": True, "prmoe": False}
    for family, tied in families.items():
        mixture(family, tie_word_embeddings=tied).save_pretrained(tmp_path / family)
    layouts = [{"ep_size": [2, 4]}, {"ep_size": 2, "expert_slices": 2}, {"tp": 2}]
    for found in run_ranks(4, loaded_in_parts, [(str(tmp_path / family), layouts) for family in families]):
        assert all(one["tensors"] == 0 and one["step"] < 1e-4 for one in found), found


def test_no_rank_ever_holds_the_whole_checkpoint(tmp_path: Path) -> None:
    model = mixture("mixtral", num_layers=3, hidden_size=256, intermediate_size=1024)
    model.save_pretrained(tmp_path / "large")
    mixture().save_pretrained(tmp_path / "small")
    whole = sum(one.nbytes for one in model.parameters())
    found = run_ranks(4, loaded_bytes, str(tmp_path / "small"), str(tmp_path / "large"))
    # A quarter of the experts: once in memory, once as pages of the file. All of them show that the measure works.
    assert max(one["part"] for one in found) < 0.75 * whole
    assert found[0]["whole"] > 1.5 * whole


def test_a_checkpoint_that_one_rank_cannot_read_is_an_error_on_every_rank(tmp_path: Path) -> None:
    mixture().save_pretrained(tmp_path / "whole")
    tiny_model("llama", num_layers=1).save_pretrained(tmp_path / "dense")
    other = mixture()
    other.lm_head.weight.data[0] += 1
    other.save_pretrained(tmp_path / "other")
    answers = run_ranks(2, not_loaded, [str(tmp_path / name) for name in ("whole", "missing", "dense", "other")])
    assert re.match(r"ConfigError: rank 1 refused: there is no directory", answers[0][0])
    assert re.match(r"ConfigError: there is no directory", answers[1][0])
    for rank, (_, dense, other_weights) in enumerate(answers):
        wanted = rf"ConfigError: ranks \[{1 - rank}\] and rank {rank} differ in the version of the checkpoint"
        assert re.match(wanted, other_weights), other_weights
        assert re.match(r"UnsupportedError: LlamaForCausalLM has no expert-parallel plan", dense), dense
