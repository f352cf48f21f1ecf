"""The large random model: what is written is an ordinary checkpoint, the same for the same seed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from recipes.benchmarks.offload import model as offload_model
from recipes.benchmarks.offload.model import olmoe_config, write_random_moe
from swarm_plugins.errors import CheckpointError, ConfigError


def small() -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.for_model(
        "olmoe",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return config


def test_transformers_loads_all_of_it_and_it_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_model, "_SHARD_BYTES", 10_000)
    seen: list[tuple[int, int]] = []
    folder = write_random_moe(small(), tmp_path / "model", progress=lambda *numbers: seen.append(numbers))
    model: Any
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert len(list(folder.glob("*.safetensors"))) > 1
    with torch.no_grad():
        logits = model(input_ids=torch.arange(8).reshape(1, 8)).logits
    assert torch.isfinite(logits).all()
    # Not a constant, and of a size that a softmax is not saturated by.
    assert 0.1 < float(logits.float().std()) < 10
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == sum(parameter.nbytes for parameter in model.parameters())


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first, again, other = (
        write_random_moe(small(), tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    files = [sorted(folder.glob("*.safetensors"))[0].read_bytes() for folder in (first, again, other)]
    assert files[0] == files[1] != files[2]


def test_a_model_that_is_there_is_not_written_again_and_nothing_else_is_overwritten(tmp_path: Path) -> None:
    folder = write_random_moe(small(), tmp_path / "model")
    stamps = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert write_random_moe(small(), folder) == folder
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == stamps
    with pytest.raises(ConfigError, match="exists and is not this random model"):
        write_random_moe(small(), folder, seed=5)


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free=1000))
    with pytest.raises(CheckpointError, match=r"has 0\.0 GB free, the model needs"):
        write_random_moe(small(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_full_scale_is_olmoe_s_own_size() -> None:
    config = olmoe_config()
    experts = config.num_hidden_layers * config.num_experts * 3 * config.hidden_size * config.intermediate_size
    assert experts * 2 == pytest.approx(12.9e9, rel=0.01)
    assert olmoe_config(0.01).num_hidden_layers == 1


@pytest.mark.parametrize("scale", [0.0, -1.0, 1.5])
def test_an_impossible_scale_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match=r"invalid --random-model .*: expected more than 0 and at most 1"):
        olmoe_config(scale)
