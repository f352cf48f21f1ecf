"""Trainers that know nothing of offloading run unchanged, and log the losses of the model in memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from datasets import Dataset
from offload_models import save_toy, tokens
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from swarm_plugins import OffloadConfig, load_offloaded

FEW_BYTES = 60_000
STEPS = 4
BATCHES = [tokens(2, 12, seed=seed) for seed in range(STEPS)]
# Four steps of sums in another order, float32.
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["mixtral", "prmoe"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("offload_trainers")
    save_toy(request.param, path)
    return path


def models(directory: Path) -> list[PreTrainedModel]:
    """Returns the toy in memory and offloaded, each with the same fresh adapter on attention and experts."""
    few = load_offloaded(directory, OffloadConfig(fast_bytes=FEW_BYTES), device="cpu")
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    tuned = []
    for model in (AutoModelForCausalLM.from_pretrained(directory), few):
        torch.manual_seed(0)
        tuned.append(get_peft_model(model, config))
    return tuned


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_trainer_of_transformers(directory: Path, tmp_path: Path, gradient_checkpointing: bool) -> None:
    found = []
    for index, model in enumerate(models(directory)):
        if gradient_checkpointing:
            model.enable_input_require_grads()
        arguments: dict[str, Any] = {
            "output_dir": str(tmp_path / str(index)),
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_steps": STEPS,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "activation_checkpointing": gradient_checkpointing,
        }
        rows = torch.cat(BATCHES).tolist()
        data = Dataset.from_dict({"input_ids": rows, "labels": rows})
        trainer = Trainer(model=model, args=TrainingArguments(**arguments), train_dataset=data)
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        saved = tmp_path / str(index) / f"checkpoint-{STEPS}"
        assert (saved / "adapter_model.safetensors").exists()
        assert not (saved / "model.safetensors").exists()
    expected, offloaded = found
    assert len(expected) == STEPS
    assert expected[-1] < expected[0]
    assert offloaded == pytest.approx(expected, abs=TOLERANCE)


class Tuner(L.LightningModule):
    """Language modelling on batches of token ids."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch, attention_mask=torch.ones_like(batch)).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-2)


# Lightning's own: its summary in other precisions, and how it looks at torch's trees.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_trainer_of_lightning(directory: Path, tmp_path: Path, precision: str) -> None:
    found = []
    for model in models(directory):
        tuner = Tuner(model)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            precision=precision,  # type: ignore[arg-type]
            max_steps=STEPS,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=True,
            default_root_dir=tmp_path,
            enable_checkpointing=False,
        )
        trainer.fit(tuner, DataLoader(BATCHES[:1] * STEPS, batch_size=None))  # type: ignore[arg-type]
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        assert all(math.isfinite(loss) for loss in tuner.losses)
        found.append(tuner.losses)
    expected, offloaded = found
    assert expected[-1] < expected[0]
    # In mixed precision attention is rounded to bfloat16 on both sides, and the plain model's adapters on experts too.
    assert offloaded == pytest.approx(expected, abs=TOLERANCE if precision == "32-true" else 0.05)
