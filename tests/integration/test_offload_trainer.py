"""transformers.Trainer on a model whose experts stay on disk: what it saves, and what it says if it cannot."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments

from swarm_plugins import OffloadConfig, load_offloaded
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.testing.models import save_tiny

IDS = torch.arange(5, 15)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("models") / "mixtral", num_layers=2)


def load(directory: Path) -> nn.Module:
    return load_offloaded(directory, OffloadConfig(fast_bytes=100_000), device="cpu").float()


def train(model: nn.Module, out: Path, save_strategy: str = "steps") -> None:
    arguments = TrainingArguments(
        str(out),
        max_steps=2,
        save_steps=1,
        save_strategy=save_strategy,
        learning_rate=0.1,
        per_device_train_batch_size=2,
        dataloader_pin_memory=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=[{"input_ids": IDS, "labels": IDS}] * 4).train()


def test_an_adapter_on_experts_is_saved_and_loaded_again(directory: Path, tmp_path: Path) -> None:
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    tuned = get_peft_model(load(directory), LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets))
    train(tuned, tmp_path)
    again = PeftModel.from_pretrained(load(directory), tmp_path / "checkpoint-2")
    with torch.no_grad():
        found, expected = (model.eval()(IDS[None]).logits for model in (again, tuned))
        untrained = load(directory)(IDS[None]).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (found - untrained).abs().max() > 1e-2


def test_a_run_whose_checkpoints_will_be_refused_is_told_at_its_first_step(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cure = r"train an adapter and save that .*Trainer with save_strategy='no'"
    model = load(directory)
    model.train(False)(IDS.unsqueeze(0))
    assert not caplog.records, "evaluation saves nothing"
    with pytest.raises(UnsupportedError, match=cure):
        train(model, tmp_path)
    (record,) = [one for one in caplog.records if one.name.startswith("swarm_plugins")]
    assert re.search(cure, record.getMessage())


def test_a_copy_that_is_trained_is_told_by_itself(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(directory)
    frozen = copy.deepcopy(model).requires_grad_(False)
    for _ in range(2):
        frozen.train()(IDS.unsqueeze(0))
    assert not caplog.records
    for _ in range(2):
        model.train()(IDS.unsqueeze(0))
    assert len(caplog.records) == 1


def test_who_trains_an_adapter_is_told_nothing(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tuned = get_peft_model(load(directory), LoraConfig(target_modules=["q_proj"], r=2))
    train(tuned, tmp_path)
    assert not [one for one in caplog.records if one.name.startswith("swarm_plugins")]


def test_other_tensors_are_trained_without_saving_the_whole_model(directory: Path, tmp_path: Path) -> None:
    model = load(directory)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    train(model, tmp_path, save_strategy="no")
    assert any(not torch.equal(one, before[name]) for name, one in model.state_dict().items())
