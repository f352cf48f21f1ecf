"""The version of a base, told by a model with remote blocks and by the plain one alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM

from swarm_plugins.backbone import AutoSwarmModelForCausalLM, base_blocks, base_version, served_blocks
from swarm_plugins.backbone.version import base_checkpoint
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.testing.models import save_tiny, tiny_model
from swarm_plugins.versions import ModelVersion


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model") / "base")


def test_remote_and_plain_models_of_a_directory_agree(directory: Path) -> None:
    with InProcessSwarm(directory) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        plain = AutoModelForCausalLM.from_pretrained(directory)
        expected = Checkpoint.open(directory).version
        assert base_version(remote) == base_version(plain) == expected
        assert [(one.start, one.end, one.quantization) for one in served_blocks(remote)] == [
            (0, 2, "none"),
            (2, 4, "none"),
        ]
        assert served_blocks(plain) == []
        assert base_blocks(remote) == base_blocks(plain)
        assert len(set(base_blocks(remote))) == 4
        for model in (remote, plain):
            adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
            assert base_version(adapted) == expected


def test_blocks_of_a_directory_that_was_overwritten_are_not_those_of_the_model(tmp_path: Path) -> None:
    directory = save_tiny("llama", tmp_path / "base")
    with InProcessSwarm(directory) as swarm:
        remote = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        save_tiny("llama", directory, seed=1)
        with pytest.raises(CheckpointError, match="but the model was loaded as"):
            base_blocks(remote)
        with pytest.raises(CheckpointError, match="but the model was loaded as"):
            base_checkpoint(remote)


@pytest.fixture
def cache(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache with two commits of org/base; the first one is that of `directory`."""
    with LocalHub() as hub:
        other = save_tiny("llama", tmp_path / "other", seed=1)
        for source in (directory, other):
            hub.add("org/base", source)
            snapshot_download("org/base", endpoint=hub.endpoint, cache_dir=tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models--org--base"


def of_the_hub(source: Path, name: str = "org/base", **options: Any) -> Any:
    """A model as transformers loads it from the Hub: it knows the repository's name and no commit."""
    model = AutoModelForCausalLM.from_pretrained(source, **options)
    model.config.name_or_path = model.config._name_or_path = name
    return model


def commits(cache: Path) -> dict[str, str]:
    """Commits by what they hold."""
    head = (cache / "refs" / "main").read_text()
    (first,) = {path.name for path in (cache / "snapshots").iterdir()} - {head}
    return {"first": first, "second": head}


def test_a_plain_model_of_the_hub_is_recognised_by_its_weights(cache: Path, directory: Path) -> None:
    known = commits(cache)
    expected = ModelVersion("org/base", known["first"])
    assert base_version(of_the_hub(directory)) == expected
    assert base_version(of_the_hub(cache / "snapshots" / known["second"])) == ModelVersion("org/base", known["second"])
    assert base_version(of_the_hub(directory, dtype=torch.bfloat16)) == expected
    adapted = get_peft_model(of_the_hub(directory), LoraConfig(target_modules="all-linear"))
    assert base_version(adapted) == expected
    assert base_version(AutoModel.from_pretrained(cache / "snapshots" / known["first"])) is not None


def test_changed_weights_are_recognised_as_no_commits(cache: Path, directory: Path) -> None:
    model = of_the_hub(directory)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    assert base_version(model) is None
    assert base_version(of_the_hub(directory, name="org/other")) is None
    assert base_version(of_the_hub(directory, name="no//name")) is None


def test_damaged_files_in_the_cache_are_passed_over(cache: Path, directory: Path) -> None:
    known = commits(cache)
    damaged = next((cache / "snapshots" / known["second"]).glob("*.safetensors"))
    damaged.unlink()
    damaged.write_bytes(b"damaged")
    assert base_version(of_the_hub(directory)) == ModelVersion("org/base", known["first"])


def test_a_model_that_was_loaded_from_nowhere_has_no_version(tmp_path: Path) -> None:
    model = tiny_model("llama")
    assert base_version(model) is None
    model.config.name_or_path = str(tmp_path / "gone")
    assert base_version(model) is None
