"""An adapter goes into a model only if it was made for the version of its base."""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import (
    PeftConfig,
    PeftModel,
    PeftType,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM

from swarm_plugins import load_adapter
from swarm_plugins.callbacks import loading
from swarm_plugins.callbacks.publishing import Publishing
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.testing.models import tiny_model
from swarm_plugins.versions import ModelVersion

Adapted = Callable[..., PeftModel]
PROMPTS = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2}


@pytest.fixture
def folder(hub: LocalHub, adapted: Adapted, tmp_path: Path) -> Path:
    """A version of an adapter, on the Hub as me/adapter@v1 too."""
    publisher = Publishing("me/adapter", endpoint=hub.endpoint, token="token")
    publisher.begin(adapted(), tmp_path)
    publisher.publish("end", 1, {})
    publisher.finish()
    return publisher.pushed[0].folder


def test_an_adapter_of_another_base_version_is_refused(
    hub: LocalHub, folder: Path, other_dir: Path, base_dir: Path, tmp_path: Path
) -> None:
    other = AutoModelForCausalLM.from_pretrained(other_dir)
    with pytest.raises(
        ConfigError, match=r"me/adapter@v1 was made for base@local-.*, the model is base@local-"
    ) as error:
        load_adapter(other, "me/adapter", endpoint=hub.endpoint, cache_dir=tmp_path / "cache")
    assert "or 'warn' to load it anyway" in str(error.value)
    assert not any("lora" in name for name, _ in other.named_modules()), "the model is as it was"
    with pytest.warns(UserWarning, match=r"was made for base@local-"):
        load_adapter(other, folder, on_mismatch="warn")


def test_a_commit_and_a_directory_cannot_be_compared(
    folder: Path, base_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoModelForCausalLM.from_pretrained(base_dir)
    monkeypatch.setattr(loading, "base_version", lambda _: ModelVersion("org/base", "a" * 40))
    with pytest.raises(ConfigError, match=r"one is a commit on the Hub and the other the content of a directory"):
        load_adapter(base, folder)


def test_an_adapter_that_does_not_tell_its_base_is_loaded_with_a_word(
    folder: Path, base_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "swarm.json").unlink()
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        load_adapter(AutoModelForCausalLM.from_pretrained(base_dir), folder)
    assert "is loaded unchecked: the version of the base it was made for is not known" in caplog.text


def test_loading_passes_on_no_warning_of_peft_and_transformers_about_each_other(folder: Path, base_dir: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(base_dir)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        assert isinstance(load_adapter(base, folder), PeftModel)
        assert list(warnings.filters) == before


def test_a_model_that_does_not_tell_its_version_is_taken_with_a_word(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_adapter(tiny_model("llama", num_layers=2), folder)
    assert "the version of the model's base is not known" in caplog.text


def test_it_joins_other_adapters_and_is_active(
    folder: Path, adapted: Adapted, base_dir: Path, tokens: torch.Tensor
) -> None:
    expected = load_adapter(AutoModelForCausalLM.from_pretrained(base_dir), folder)
    model = load_adapter(adapted(name="first"), folder, adapter_name="second")
    assert model.active_adapter == "second"
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, expected(input_ids=tokens).logits)
    with pytest.raises(ConfigError, match=r"has an adapter named 'second' already \(it has first, second\)"):
        load_adapter(model, folder, adapter_name="second")


@pytest.mark.parametrize("is_trainable", [False, True])
def test_one_that_joins_others_is_frozen_unless_it_shall_be_trained(
    is_trainable: bool, folder: Path, base_dir: Path
) -> None:
    first = load_adapter(AutoModelForCausalLM.from_pretrained(base_dir), folder)
    model = load_adapter(first, folder, adapter_name="second", is_trainable=is_trainable)
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert bool(trained) == is_trainable
    assert all(".second." in name for name in trained)


@pytest.mark.parametrize("is_trainable", [False, True])
def test_a_prompt_joins_a_prompt(is_trainable: bool, base_dir: Path, tmp_path: Path) -> None:
    config = PromptTuningConfig(**PROMPTS)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base_dir), config).save_pretrained(tmp_path)
    first = load_adapter(AutoModelForCausalLM.from_pretrained(base_dir), tmp_path)
    model = load_adapter(first, tmp_path, adapter_name="second", is_trainable=is_trainable)
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    assert trained == (["prompt_encoder.second.embedding.weight"] if is_trainable else [])


def test_one_that_cannot_join_leaves_its_name_free(folder: Path, base_dir: Path, tmp_path: Path) -> None:
    odd = shutil.copytree(folder, tmp_path / "odd")
    config = json.loads((odd / "adapter_config.json").read_text())
    (odd / "adapter_config.json").write_text(json.dumps({**config, "r": 3}))
    model = load_adapter(AutoModelForCausalLM.from_pretrained(base_dir), folder)
    with pytest.raises(CheckpointError, match=r"does not fit the model .*size mismatch"):
        load_adapter(model, odd, adapter_name="second")
    assert load_adapter(model, folder, adapter_name="second").active_adapter == "second"


def test_it_can_be_trained_further(folder: Path, base_dir: Path) -> None:
    frozen = load_adapter(AutoModelForCausalLM.from_pretrained(base_dir), folder)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    trainable = load_adapter(AutoModelForCausalLM.from_pretrained(base_dir), folder, is_trainable=True)
    assert {name.split(".")[-3] for name, one in trainable.named_parameters() if one.requires_grad} == {
        "lora_A",
        "lora_B",
    }


@pytest.mark.parametrize(
    "config",
    [PromptTuningConfig(**PROMPTS), PrefixTuningConfig(**PROMPTS), PromptEncoderConfig(**PROMPTS)],
    ids=lambda config: config.peft_type.value,
)
def test_a_prompt_can_be_trained_further_if_its_file_has_all_of_it(
    config: PeftConfig, adapted: Adapted, base_dir: Path, tokens: torch.Tensor, tmp_path: Path
) -> None:
    first = adapted(config)
    first.save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(base_dir)
    if config.peft_type == PeftType.P_TUNING:
        with pytest.raises(UnsupportedError, match=r"type P_TUNING and cannot be trained further: .*; load it to use"):
            load_adapter(base, tmp_path, is_trainable=True)
        return
    model = load_adapter(base, tmp_path, is_trainable=True)
    loss = model(input_ids=tokens, labels=tokens).loss
    assert loss == first(input_ids=tokens, labels=tokens).loss
    loss.backward()
    trained = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    assert [name for name, gradient in trained.items() if gradient.any()] == ["prompt_encoder.default.embedding.weight"]


def test_a_damaged_adapter_and_one_that_does_not_fit_are_named(folder: Path, base_dir: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 3}))
    with pytest.raises(CheckpointError, match=r"does not fit the model .*size mismatch"):
        load_adapter(AutoModelForCausalLM.from_pretrained(base_dir), folder)
    (folder / "adapter_config.json").write_text(json.dumps({**config, "megatron_config": {"x": 1}}))
    with pytest.raises(CheckpointError, match=r"sets megatron_config, which would load code"):
        load_adapter(AutoModelForCausalLM.from_pretrained(base_dir), folder)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=r"does not fit the model \(SafetensorError"):
        load_adapter(AutoModelForCausalLM.from_pretrained(base_dir), folder)


def test_wrong_settings_are_named(folder: Path, base_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base_dir)
    with pytest.raises(ConfigError, match=r"on_mismatch='ignore' must be 'refuse', 'carry' or 'warn'"):
        load_adapter(model, folder, on_mismatch="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"version='v1' was given for the directory"):
        load_adapter(model, folder, "v1")
    with pytest.raises(ConfigError, match=r"is not a directory"):
        load_adapter(model, folder / "none")
    for path in ("./nope", "../nope", "/no/such", "~/nope", "a/b/c", "nope/"):
        with pytest.raises(ConfigError, match=rf"there is no directory '{re.escape(path)}': give the folder"):
            load_adapter(model, path)
