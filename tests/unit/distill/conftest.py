"""A teacher, a student, and trainers with few steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from distill_kit import ROWS, loader
from transformers import PreTrainedModel, Trainer, TrainingArguments

from swarm_plugins import make_student
from swarm_plugins.testing.models import save_tiny, tiny_model


@pytest.fixture(scope="session")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("models") / "teacher", num_layers=2)


@pytest.fixture
def teacher() -> PreTrainedModel:
    return tiny_model("mixtral", num_layers=2)


@pytest.fixture
def student(teacher: PreTrainedModel) -> PreTrainedModel:
    return make_student(teacher, depth=1)


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Any]:
    """Fits a module in Lightning's Trainer, by default 6 steps of 2 rows, and returns the Trainer."""

    def run(module: Any, *callbacks: Any, spelling: Any = pl, ckpt_path: Any = None, **options: Any) -> Any:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        settings = {"max_steps": 6, "enable_checkpointing": False, "default_root_dir": tmp_path, **quiet, **options}
        trainer = spelling.Trainer(callbacks=list(callbacks), **settings)
        trainer.fit(module, loader(), ckpt_path=ckpt_path)
        return trainer

    return run


@pytest.fixture
def hf_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    """Makes a Trainer of transformers, by default 6 steps of 2 rows."""

    def make(model: Any, *callbacks: Any, **options: Any) -> Trainer:
        settings = {
            "max_steps": 6,
            "per_device_train_batch_size": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "learning_rate": 1e-3,
        }
        arguments = TrainingArguments(str(tmp_path / "hf"), **{**settings, **options})
        data = [{"input_ids": row, "labels": row} for row in ROWS]
        return Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=list(callbacks))

    return make
