"""An adapter is carried over to the next version of its base if what it tunes is the same there."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, PromptTuningConfig
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins import load_adapter
from swarm_plugins.callbacks import carrying, loading
from swarm_plugins.callbacks.publishing import Publishing
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.local_hub import LocalHub

Adapted = Callable[..., PeftModel]
TARGETS = ["q_proj", "v_proj"]
NAME = "me/base"


def lora(layers: Sequence[int], **settings: object) -> LoraConfig:
    return LoraConfig(target_modules=TARGETS, layers_to_transform=list(layers), task_type="CAUSAL_LM", **settings)


PROMPT = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
HEAD = LoraConfig(target_modules=["q_proj", "lm_head"], layers_to_transform=[0], task_type="CAUSAL_LM")
WHOLE_HEAD = lora([0], modules_to_save=["lm_head"])


@pytest.fixture(scope="module")
def next_dir(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base's next version: block 1 and the head have changed."""
    model, folder = AutoModelForCausalLM.from_pretrained(base_dir), tmp_path_factory.mktemp("next") / "base"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers.1." in name or "lm_head" in name:
                parameter *= 1.5
    model.save_pretrained(folder)
    return folder


def published(model: PeftModel, hub: LocalHub, folder: Path) -> Path:
    publisher = Publishing("me/adapter", endpoint=hub.endpoint, token="token")
    publisher.begin(model, folder)
    publisher.publish("end", 1, {})
    publisher.finish()
    return publisher.pushed[0].folder


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param(lora([0]), None, id="block-that-is-the-same"),
        pytest.param(lora([0, 1]), "it tunes blocks 1, which are others there", id="block-that-has-changed"),
        pytest.param(PROMPT, "it tunes blocks 1, which are others there", id="prompt"),
        pytest.param(HEAD, "it tunes modules outside of the blocks", id="head"),
        pytest.param(WHOLE_HEAD, None, id="whole-head"),
    ],
)
def test_a_directory_is_told_by_fingerprints_of_its_blocks(
    adapted: Adapted, next_dir: Path, hub: LocalHub, tmp_path: Path, config: PeftConfig, words: str | None
) -> None:
    folder = published(adapted(config), hub, tmp_path)
    check_rule(AutoModelForCausalLM.from_pretrained(next_dir), folder, words)


def check_rule(model: PreTrainedModel, folder: Path, words: str | None, **hub: object) -> PeftModel | None:
    """Checks that an adapter is refused by default, and otherwise carried over unless there are words against it."""
    with pytest.raises(ConfigError, match=r"or pass on_mismatch='carry' to load it if"):
        load_adapter(model, folder, **hub)  # type: ignore[arg-type]
    if words is None:
        with pytest.warns(UserWarning, match=r"is carried over to .*base@.*evaluate it before you rely on it"):
            return load_adapter(model, folder, on_mismatch="carry", **hub)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        load_adapter(model, folder, on_mismatch="carry", **hub)  # type: ignore[arg-type]
    return None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param(lora([0]), None, id="block-that-is-the-same"),
        pytest.param(lora([1]), "it tunes blocks 1, which are others there", id="block-that-has-changed"),
        pytest.param(HEAD, "it tunes modules outside of the blocks", id="head"),
    ],
)
def test_commits_are_told_by_their_files(
    adapted: Adapted,
    base_dir: Path,
    next_dir: Path,
    hub: LocalHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: PeftConfig,
    words: str | None,
) -> None:
    folder, (then, now) = published(adapted(config), hub, tmp_path), (hub.add(NAME, base_dir), hub.add(NAME, next_dir))
    manifest = json.loads((folder / "swarm.json").read_text())
    (folder / "swarm.json").write_text(json.dumps({**manifest, "base_name": NAME, "base_revision": then}))
    where = {"endpoint": hub.endpoint, "cache_dir": tmp_path / "cache"}
    monkeypatch.setenv("SWARM_PLUGINS_CACHE", str(tmp_path / "ranges"))
    # As for a model that was loaded from that commit.
    checkpoint = Checkpoint.open(NAME, revision=now, **where)
    monkeypatch.setattr(loading, "base_version", lambda _: checkpoint.version)
    monkeypatch.setattr(carrying, "base_checkpoint", lambda _, **__: checkpoint)
    check_rule(AutoModelForCausalLM.from_pretrained(next_dir), folder, words, **where)


def test_what_is_not_known_is_not_carried_over(adapted: Adapted, next_dir: Path, hub: LocalHub, tmp_path: Path) -> None:
    folder = published(adapted(lora([0])), hub, tmp_path)
    manifest = json.loads((folder / "swarm.json").read_text())
    (folder / "swarm.json").write_text(json.dumps({**manifest, "block_fingerprints": []}))
    with pytest.raises(CheckpointError, match=r"there are no fingerprints of the blocks of both bases"):
        load_adapter(AutoModelForCausalLM.from_pretrained(next_dir), folder, on_mismatch="carry")
