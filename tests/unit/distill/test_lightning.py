"""StagedDistillation in Lightning's Trainer, with an ordinary module."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from distill_kit import ROWS, Tuner, loader
from torch import Tensor
from transformers import PreTrainedModel

from swarm_plugins import StagedDistillation, make_student
from swarm_plugins.distill import distillation_loss
from swarm_plugins.errors import ConfigError
from swarm_plugins.testing.models import tiny_model, tiny_tokenizer

pytestmark = [
    # Lightning's advice about data loaders, loggers and folders.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.*(LeafSpec|tree_map|treespec).*"),
]
Fit = Callable[..., Any]


def by_hand(
    student: PreTrainedModel, teacher: PreTrainedModel, weights: list[float], temperature: float
) -> list[float]:
    """The losses of the same training, written out."""
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    losses = []
    for weight, batch in zip(weights, ROWS.split(2), strict=False):
        output = student(input_ids=batch, labels=batch)
        with torch.no_grad():
            taught = teacher(input_ids=batch).logits
        loss = output.loss
        if weight:
            loss = loss + weight * distillation_loss(output.logits, taught, batch, temperature=temperature)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("spelling", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize(
    ("schedule", "weights"), [("stop", [0.5, 0.5, 0.5, 0, 0, 0]), ("linear", [0.5, 1 / 3, 1 / 6, 0, 0, 0])]
)
def test_training_equals_the_loop_written_out(
    spelling: str, schedule: Any, weights: list[float], student: PreTrainedModel, teacher: PreTrainedModel, fit: Fit
) -> None:
    library = importlib.import_module(spelling)
    expected = by_hand(make_student(teacher, depth=1), teacher, weights, 2.0)

    class Module(library.LightningModule):  # type: ignore[misc,name-defined]
        training_step, configure_optimizers = Tuner.training_step, Tuner.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = student, []

    callback = StagedDistillation(teacher, 3, alpha=0.5, temperature=2.0, schedule=schedule)
    assert isinstance(callback, library.Callback)
    module = Module()
    fit(module, callback, spelling=library)
    assert module.losses == pytest.approx(expected, rel=1e-5)
    assert callback.num_teacher_forwards == 3


def test_after_the_stop_no_teacher_forward_is_made_and_its_memory_is_freed(student: PreTrainedModel, fit: Fit) -> None:
    teacher = tiny_model("mixtral", num_layers=2)
    calls: list[int] = []
    teacher.register_forward_hook(lambda *_: calls.append(1))
    alive = weakref.ref(teacher.lm_head.weight)
    callback = StagedDistillation(teacher, stop_at=0.5)
    del teacher
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append((len(calls), alive() is not None))

    # The watch comes after the callback.
    fit(Tuner(student), callback, Watch())
    assert seen == [(1, True), (2, True), (3, False), (3, False), (3, False), (3, False)]
    assert not student._forward_hooks, "nothing is left of it"


def test_validation_has_no_distillation(student: PreTrainedModel, teacher: PreTrainedModel, fit: Fit) -> None:
    module = Tuner(student)
    callback = StagedDistillation(teacher, stop_at=6)
    trainer = pl.Trainer(
        max_steps=4,
        val_check_interval=2,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(module, loader(), loader())
    assert callback.num_teacher_forwards == 4
    with torch.no_grad():
        expected = torch.stack([student(input_ids=one, labels=one).loss for one in ROWS.split(2)]).mean()
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(expected.item(), rel=1e-5)


def test_metrics_tell_the_losses_and_whether_the_stage_is_on(
    student: PreTrainedModel, teacher: PreTrainedModel, fit: Fit
) -> None:
    seen: list[dict[str, float]] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    module = Tuner(student)
    fit(module, StagedDistillation(teacher, 2, alpha=0.25), Watch())
    assert [one["kd_weight"] for one in seen] == [0.25, 0.25, 0, 0, 0, 0]
    assert module.losses[0] == pytest.approx(seen[0]["lm_loss"] + 0.25 * seen[0]["kd_loss"], rel=1e-5)


def test_all_parts_of_an_accumulated_step_are_treated_alike(
    student: PreTrainedModel, teacher: PreTrainedModel, fit: Fit
) -> None:
    callback = StagedDistillation(teacher, stop_at=0.5)
    trainer = fit(Tuner(student), callback, max_steps=-1, max_epochs=1, accumulate_grad_batches=2)
    assert trainer.global_step == 4
    assert callback.stop_step == 2
    assert callback.num_teacher_forwards == 4


def test_steps_of_several_optimizers_count_as_the_trainer_counts_them(
    student: PreTrainedModel, teacher: PreTrainedModel, fit: Fit
) -> None:
    class Two(Tuner):
        def __init__(self, model: PreTrainedModel) -> None:
            super().__init__(model)
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
            loss = self.model(input_ids=batch, labels=batch).loss
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            head = list(self.model.lm_head.parameters())
            return torch.optim.SGD(head, lr=0.1), torch.optim.SGD(self.model.model.parameters(), lr=0.1)

    callback = StagedDistillation(teacher, stop_at=0.5)
    trainer = fit(Two(student), callback, max_steps=-1, max_epochs=1)
    assert trainer.global_step == 16
    assert callback.stop_step == 8
    assert callback.num_teacher_forwards == 4, "half of the 8 batches"


def test_mixed_precision_gives_nearly_the_same_losses(teacher: PreTrainedModel, fit: Fit) -> None:
    losses = []
    for precision in ("32-true", "bf16-mixed"):
        module = Tuner(make_student(teacher, depth=1))
        fit(module, StagedDistillation(teacher, 6, temperature=2.0), precision=precision)
        losses.append(module.losses)
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]


def test_a_resumed_run_keeps_the_stop_and_never_loads_the_teacher(
    teacher: PreTrainedModel, teacher_dir: Path, fit: Fit, tmp_path: Path
) -> None:
    first = StagedDistillation(teacher_dir, stop_at=0.5)
    trainer = fit(Tuner(make_student(teacher, depth=1)), first)
    trainer.save_checkpoint(tmp_path / "run.ckpt")

    def load() -> PreTrainedModel:
        raise AssertionError("the teacher was loaded")

    resumed = StagedDistillation(load, stop_at=0.5)
    module = Tuner(make_student(teacher, depth=1))
    fit(module, resumed, ckpt_path=tmp_path / "run.ckpt", max_steps=16)
    assert len(module.losses) == 10
    assert resumed.stop_step == 3, "not half of the longer run"
    assert resumed.num_teacher_forwards == 0
    assert module.model.config.distillation["teacher"] == "teacher"


def test_a_run_resumed_before_the_stop_goes_on_to_it(
    teacher: PreTrainedModel, teacher_dir: Path, fit: Fit, tmp_path: Path
) -> None:
    trainer = fit(Tuner(make_student(teacher, depth=1)), StagedDistillation(teacher_dir, stop_at=4), max_steps=2)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    resumed = StagedDistillation(teacher_dir, stop_at=4)
    fit(Tuner(make_student(teacher, depth=1)), resumed, ckpt_path=tmp_path / "run.ckpt")
    assert resumed.num_teacher_forwards == 2


def test_a_checkpoint_that_was_only_validated_does_not_set_the_stop(
    student: PreTrainedModel, teacher_dir: Path, fit: Fit, tmp_path: Path
) -> None:
    callback = StagedDistillation(teacher_dir, stop_at=0.5)
    trainer = fit(Tuner(student), callback)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    trainer.validate(Tuner(student), loader(), ckpt_path=tmp_path / "run.ckpt", verbose=False)
    fit(Tuner(student), callback, max_steps=2)
    assert callback.stop_step == 1


def test_a_changed_stop_moves_it(
    teacher: PreTrainedModel, teacher_dir: Path, fit: Fit, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = fit(Tuner(make_student(teacher, depth=1)), StagedDistillation(teacher_dir, stop_at=2), max_steps=3)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    resumed = StagedDistillation(teacher_dir, stop_at=5)
    fit(Tuner(make_student(teacher, depth=1)), resumed, ckpt_path=tmp_path / "run.ckpt")
    assert resumed.num_teacher_forwards == 2
    assert "stop_at is 5 now, and was 2 (step 2) in the checkpoint" in caplog.text


def test_alpha_zero_is_a_run_without_a_teacher(student: PreTrainedModel, fit: Fit) -> None:
    callback = StagedDistillation("/nonexistent", stop_at=3, alpha=0.0)
    fit(Tuner(student), callback)
    assert callback.num_teacher_forwards == 0
    assert student.config.distillation["distilled_steps"] == 0


def test_the_teacher_stays_as_it_is(student: PreTrainedModel, teacher: PreTrainedModel, fit: Fit) -> None:
    before = {name: one.clone() for name, one in teacher.state_dict().items()}
    fit(Tuner(student), StagedDistillation(teacher.train(), stop_at=3))
    assert not any(one.training for one in teacher.modules())
    assert all(one.grad is None for one in teacher.parameters())
    assert all(torch.equal(one, before[name]) for name, one in teacher.state_dict().items())


def test_a_teacher_loaded_in_inference_mode_teaches(student: PreTrainedModel, fit: Fit) -> None:
    with torch.inference_mode():
        teacher = tiny_model("mixtral", num_layers=2)
    module = Tuner(student)
    fit(module, StagedDistillation(teacher, stop_at=3))
    assert len(module.losses) == 6


def test_the_config_names_teacher_stop_and_settings(teacher_dir: Path, tmp_path: Path, fit: Fit) -> None:
    student = make_student(teacher_dir, depth=1)
    fit(Tuner(student), StagedDistillation(teacher_dir, 4, alpha=0.5, temperature=2.0, schedule="linear"))
    student.save_pretrained(tmp_path / "student")
    loaded = type(student.config).from_pretrained(tmp_path / "student").distillation
    revision = loaded.pop("teacher_revision")
    assert revision.startswith("local-")
    assert loaded == {
        "teacher": "teacher",
        "kept_layers": [0],
        "stop_step": 4,
        "distilled_steps": 4,
        "alpha": 0.5,
        "temperature": 2.0,
        "schedule": "linear",
    }


def test_a_teacher_of_another_vocabulary_is_refused(student: PreTrainedModel, fit: Fit) -> None:
    teacher = tiny_model("llama")
    teacher.resize_token_embeddings(130)
    with pytest.raises(ConfigError, match=r"teacher's vocabulary has 130 tokens, the student's 128.*make_student"):
        fit(Tuner(student), StagedDistillation(teacher, 3))


def test_a_teacher_on_another_device_is_refused(student: PreTrainedModel, fit: Fit) -> None:
    with pytest.raises(ConfigError, match=r"teacher is on meta, the student on cpu: move it with teacher.to\('cpu'\)"):
        fit(Tuner(student), StagedDistillation(tiny_model("mixtral").to("meta"), 3))


@pytest.mark.parametrize("path", [None, "model"])
def test_a_teacher_that_is_the_student_is_refused(path: str | None, student: PreTrainedModel, fit: Fit) -> None:
    with pytest.raises(ConfigError, match=r"the teacher is the student: it would change.*make_student\(teacher"):
        fit(Tuner(student), StagedDistillation(student, 3, student=path))


def test_another_tokenizer_is_refused(student: PreTrainedModel, teacher_dir: Path) -> None:
    class Data(pl.LightningDataModule):
        tokenizer = tiny_tokenizer()

        def train_dataloader(self) -> Any:
            return loader()

    data = Data()
    data.tokenizer.add_tokens(["swarm"])
    trainer = pl.Trainer(
        max_steps=1,
        callbacks=[StagedDistillation(teacher_dir, 3)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    with pytest.raises(ConfigError, match=r"tokenizer of the teacher .* differs from the student's in 1 of \d+ tokens"):
        trainer.fit(Tuner(student), data)


def test_a_teacher_that_shares_weights_with_the_student_is_refused(
    student: PreTrainedModel, teacher: PreTrainedModel, fit: Fit
) -> None:
    teacher.lm_head.weight = student.lm_head.weight
    with pytest.raises(ConfigError, match=r"shares 1 weights with it, such as lm_head.weight.*load the teacher once"):
        fit(Tuner(student), StagedDistillation(teacher, 3))


def test_a_teacher_inside_the_module_is_refused(student: PreTrainedModel, teacher: PreTrainedModel, fit: Fit) -> None:
    module = Tuner(student)
    module.teacher = teacher
    with pytest.raises(ConfigError, match=r"teacher is part of Tuner \(teacher\..*give it to the callback alone"):
        fit(module, StagedDistillation(teacher, 3))


def test_several_models_need_the_students_path(student: PreTrainedModel, teacher: PreTrainedModel, fit: Fit) -> None:
    module = Tuner(student)
    module.other = tiny_model("llama", num_layers=1)
    with pytest.raises(ConfigError, match=r"Tuner has 2 models of transformers \(model, other\).*student='model'"):
        fit(module, StagedDistillation(teacher, 3))
    callback = StagedDistillation(teacher, 3, student="model")
    fit(module, callback)
    assert callback.num_teacher_forwards == 3
    with pytest.raises(ConfigError, match=r"student='mode': Tuner has no such module.*model, other"):
        fit(module, StagedDistillation(teacher, 3, student="mode"))


def test_a_step_without_labels_is_refused(student: PreTrainedModel, teacher: PreTrainedModel, fit: Fit) -> None:
    class Own(Tuner):
        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.model(input_ids=batch).logits.float().mean()

    with pytest.raises(ConfigError, match=r"went by without distillation.*pass labels=.*distillation_loss"):
        fit(Own(student), StagedDistillation(teacher, 3))


def test_a_missing_teacher_is_named(student: PreTrainedModel, fit: Fit, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"teacher '.*nowhere' cannot be loaded.*give the directory"):
        fit(Tuner(student), StagedDistillation(tmp_path / "nowhere", 3))


def test_a_freed_teacher_cannot_teach_a_second_run(student: PreTrainedModel, fit: Fit, teacher_dir: Path) -> None:
    callback = StagedDistillation(tiny_model("mixtral", num_layers=2), 3)
    fit(Tuner(student), callback)
    with pytest.raises(ConfigError, match=r"freed at the stop of an earlier run; give teacher as a directory"):
        fit(Tuner(student), callback)
    callback = StagedDistillation(teacher_dir, 3)
    for _ in range(2):
        fit(Tuner(student), callback)
        assert callback.num_teacher_forwards == 3


def test_the_memory_of_a_loaded_teacher_is_freed(student: PreTrainedModel, fit: Fit, teacher_dir: Path) -> None:
    alive: list[Any] = []

    def load() -> PreTrainedModel:
        model = tiny_model("mixtral", num_layers=2)
        alive.append(weakref.ref(model.lm_head.weight))
        return model

    gc.disable()
    try:
        fit(Tuner(student), StagedDistillation(load, 3))
        assert [one() for one in alive] == [None]
    finally:
        gc.enable()
