"""StagedDistillationTrainerCallback in the Trainer of transformers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_kit import ROWS
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, Trainer, TrainerCallback

from swarm_plugins import StagedDistillationTrainerCallback, make_student
from swarm_plugins.distill import distillation_loss
from swarm_plugins.errors import ConfigError
from swarm_plugins.testing.models import tiny_model, tiny_tokenizer

Make = Callable[..., Trainer]


def entries(trainer: Trainer, name: str) -> list[float]:
    return [one[name] for one in trainer.state.log_history if name in one and "loss" in one]


def test_the_logged_loss_is_the_sum_and_the_stop_is_exact(
    student: PreTrainedModel, teacher: PreTrainedModel, hf_trainer: Make
) -> None:
    callback = StagedDistillationTrainerCallback(teacher, 0.5, alpha=0.5, temperature=2.0)
    trainer = hf_trainer(student, callback)
    trainer.train()
    assert callback.num_teacher_forwards == 3
    assert entries(trainer, "kd_weight") == [0.5, 0.5, 0.5, 0, 0, 0]
    sums = [lm + 0.5 * kd for lm, kd in zip(entries(trainer, "lm_loss"), entries(trainer, "kd_loss"), strict=True)]
    assert entries(trainer, "loss")[:3] == pytest.approx(sums, rel=1e-5)
    assert not student._forward_hooks


def test_the_first_loss_equals_the_formula(
    student: PreTrainedModel, teacher: PreTrainedModel, hf_trainer: Make
) -> None:
    rows = ROWS[:4]
    with torch.no_grad():
        output = student(input_ids=rows, labels=rows)
        kd = distillation_loss(output.logits, teacher(input_ids=rows).logits, rows, temperature=2.0)
        expected = (output.loss + kd).item()
    for options in ({"per_device_train_batch_size": 4}, {"gradient_accumulation_steps": 2}):
        fresh = make_student(teacher, depth=1)
        callback = StagedDistillationTrainerCallback(teacher, 1, temperature=2.0)
        trainer = hf_trainer(fresh, callback, max_steps=2, train_sampling_strategy="sequential", **options)
        trainer.train()
        assert entries(trainer, "loss")[0] == pytest.approx(expected, rel=1e-5)
        assert callback.num_teacher_forwards == options.get("gradient_accumulation_steps", 1)


def test_padding_and_labels_of_different_length_weigh_tokens_alike_under_accumulation(
    teacher: PreTrainedModel, hf_trainer: Make
) -> None:
    losses = []
    for options in (
        {"per_device_train_batch_size": 4},
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1},
    ):
        trainer = hf_trainer(
            make_student(teacher, depth=1),
            StagedDistillationTrainerCallback(teacher, 2),
            max_steps=2,
            train_sampling_strategy="sequential",
            **options,
        )
        labels = ROWS[:8].clone()
        labels[0, :9] = -100
        labels[1, 2:] = -100
        trainer.train_dataset = [{"input_ids": row, "labels": label} for row, label in zip(ROWS, labels, strict=False)]
        trainer.train()
        losses.append(entries(trainer, "kd_loss") + entries(trainer, "loss"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_teachers_memory_is_freed_at_the_stop(student: PreTrainedModel, hf_trainer: Make) -> None:
    teacher = tiny_model("mixtral", num_layers=2)
    alive = weakref.ref(teacher.lm_head.weight)
    callback = StagedDistillationTrainerCallback(teacher, stop_at=2)
    del teacher
    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append(alive() is not None)

    hf_trainer(student, callback, Watch()).train()
    assert seen == [True, False, False, False, False, False]


def test_evaluation_has_no_distillation(student: PreTrainedModel, teacher: PreTrainedModel, hf_trainer: Make) -> None:
    callback = StagedDistillationTrainerCallback(teacher, stop_at=6)
    trainer = hf_trainer(student, callback, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert callback.num_teacher_forwards == 6
    trainer.evaluate()
    assert callback.num_teacher_forwards == 6


@pytest.mark.parametrize("restored", [False, True], ids=["states-ignored", "states-restored"])
def test_a_resumed_run_keeps_the_stop_and_never_loads_the_teacher(
    restored: bool, teacher: PreTrainedModel, teacher_dir: Path, hf_trainer: Make
) -> None:
    first = StagedDistillationTrainerCallback(teacher_dir, stop_at=0.5)
    hf_trainer(make_student(teacher, depth=1), first, max_steps=4, save_strategy="steps", save_steps=3).train()

    def load() -> PreTrainedModel:
        raise AssertionError("the teacher was loaded")

    resumed = StagedDistillationTrainerCallback(load, stop_at=0.5)
    trainer = hf_trainer(
        make_student(teacher, depth=1), resumed, max_steps=12, restore_callback_states_from_checkpoint=restored
    )
    trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-3"))
    assert trainer.state.global_step == 12
    assert resumed.stop_step == 2
    assert resumed.num_teacher_forwards == 0
    assert trainer.model.config.distillation["teacher"] == "teacher"


def test_a_lora_student_is_taught(student: PreTrainedModel, teacher: PreTrainedModel, hf_trainer: Make) -> None:
    tuned = get_peft_model(student, LoraConfig(target_modules=["q_proj"]))
    callback = StagedDistillationTrainerCallback(teacher, stop_at=3)
    trainer = hf_trainer(tuned, callback)
    trainer.train()
    assert callback.num_teacher_forwards == 3
    assert len(entries(trainer, "kd_loss")) == 3


def test_gradient_checkpointing_calls_the_teacher_once_a_batch(
    student: PreTrainedModel, teacher: PreTrainedModel, hf_trainer: Make
) -> None:
    callback = StagedDistillationTrainerCallback(teacher, stop_at=3)
    hf_trainer(student, callback, activation_checkpointing=True).train()
    assert callback.num_teacher_forwards == 3


def test_mixed_precision_trains(student: PreTrainedModel, teacher: PreTrainedModel, hf_trainer: Make) -> None:
    callback = StagedDistillationTrainerCallback(teacher.bfloat16(), stop_at=3)
    trainer = hf_trainer(student, callback, bf16=True)
    trainer.train()
    assert all(value > 0 for value in entries(trainer, "kd_loss"))


def test_label_smoothing_is_refused(student: PreTrainedModel, teacher: PreTrainedModel, hf_trainer: Make) -> None:
    callback = StagedDistillationTrainerCallback(teacher, stop_at=3)
    with pytest.raises(ConfigError, match=r"went by without distillation.*label smoothing"):
        hf_trainer(student, callback, label_smoothing_factor=0.1).train()


def test_another_tokenizer_is_refused(
    student: PreTrainedModel, teacher_dir: Path, hf_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tiny_tokenizer()
    other.add_tokens(["swarm"])
    monkeypatch.setenv("HOME", str(teacher_dir.parent))
    trainer = hf_trainer(student, StagedDistillationTrainerCallback("~/teacher", stop_at=3))
    trainer.callback_handler.processing_class = other
    with pytest.raises(ConfigError, match=r"differs from the student's in 1 of \d+ tokens: 'swarm' is None there and"):
        trainer.train()
    trainer.callback_handler.processing_class = tiny_tokenizer()
    trainer.train()
    assert student.config.distillation["teacher"] == "teacher"
