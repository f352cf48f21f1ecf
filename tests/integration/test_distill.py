"""Teachers that are elsewhere: experts on disk, and blocks on a swarm of real server processes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import trainer_kit
from torch import Tensor
from trainer_kit import ROWS, quiet_trainer
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from swarm_plugins import (
    AutoSwarmModelForCausalLM,
    OffloadConfig,
    StagedDistillation,
    StagedDistillationTrainerCallback,
    load_offloaded,
    make_student,
)
from swarm_plugins.distill import Distillation

pytestmark = [
    # Lightning's advice about data loaders, loggers and folders.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.*(LeafSpec|tree_map|treespec).*"),
]
# Fixtures.
model, swarm, peers = trainer_kit.model, trainer_kit.swarm, trainer_kit.peers
STEPS = 4
STOP = 2


def loop_losses(directory: Path, load: Callable[[], Any]) -> list[float]:
    """Trains a student in a loop of its own and returns its losses, those with the term first."""
    student = make_student(directory, depth=2)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    distillation = Distillation(load, stop_at=STOP, alpha=0.5, temperature=2.0)
    distillation.begin(student, STEPS)
    losses = []
    for step in range(STEPS):
        distillation.at(step)
        loss = student(input_ids=ROWS[:4], labels=ROWS[:4]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    distillation.end()
    assert distillation.num_teacher_forwards == STOP
    return losses


@pytest.fixture
def expected(model: Path) -> list[float]:
    return loop_losses(model, lambda: AutoModelForCausalLM.from_pretrained(model))


def check_teaching(model: Path, load: Callable[[], PreTrainedModel], expected: list[float]) -> None:
    alive: list[Any] = []

    def noting() -> PreTrainedModel:
        teacher = load()
        alive.append(weakref.ref(teacher))
        return teacher

    assert loop_losses(model, noting) == pytest.approx(expected, rel=1e-5)
    gc.collect()
    assert alive[0]() is None


def test_an_offloaded_teacher_teaches_as_one_in_memory(model: Path, expected: list[float]) -> None:
    # Two of four experts a layer fit.
    check_teaching(model, lambda: load_offloaded(model, OffloadConfig(fast_bytes=120_000)), expected)


@pytest.mark.swarm
@pytest.mark.usefixtures("peers")
def test_a_teacher_on_a_swarm_teaches_as_one_in_memory(model: Path, expected: list[float]) -> None:
    check_teaching(model, lambda: AutoSwarmModelForCausalLM.from_pretrained(model), expected)


@pytest.mark.swarm
def test_trainers_with_a_teacher_on_a_swarm(
    model: Path,
    peers: list[str],
    tmp_path: Path,
    expected: list[float],
) -> None:
    class Tuner(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_student(model, depth=2)
            self.losses: list[float] = []

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            loss: Tensor = self.model(input_ids=batch, labels=batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    settings: dict[str, Any] = {"alpha": 0.5, "temperature": 2.0}
    module = Tuner()
    batches = torch.utils.data.DataLoader(ROWS[:4].repeat(STEPS, 1), batch_size=4)
    callback = StagedDistillation(lambda: AutoSwarmModelForCausalLM.from_pretrained(model), STOP, **settings)
    trainer = quiet_trainer(max_steps=STEPS, callbacks=[callback], enable_checkpointing=False)
    trainer.fit(module, batches)
    assert module.losses == pytest.approx(expected, rel=1e-5)
    record = module.model.config.distillation
    assert record["teacher"] == model.name, "a remote teacher knows its name"
    assert record["teacher_revision"].startswith("local-")

    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=1,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    remote = StagedDistillationTrainerCallback(
        lambda: AutoSwarmModelForCausalLM.from_pretrained(model), STOP, **settings
    )
    data = [{"input_ids": row, "labels": row} for row in ROWS[:4].repeat(STEPS, 1)]
    hf = Trainer(make_student(model, depth=2), arguments, train_dataset=data, callbacks=[remote])
    hf.train()
    losses = [one["loss"] for one in hf.state.log_history if "loss" in one]
    assert losses == pytest.approx(expected, rel=1e-4)
    assert remote.num_teacher_forwards == STOP
