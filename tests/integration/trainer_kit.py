"""A tiny swarm for trainers, and LoRA on its model as a user writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from swarm_plugins import LocalSwarm, SwarmConfig
from swarm_plugins.client import connect
from swarm_plugins.client.training.batch import BatchCall
from swarm_plugins.testing.models import save_tiny

IN_A_RUN = [
    pytest.mark.swarm,
    pytest.mark.usefixtures("peers"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]
"""Marks of tests that train together with others."""
ROWS = torch.randint(3, 100, (8, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("models") / "tiny-mixtral")


@pytest.fixture(scope="module")
def swarm(model: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(model, num_servers=2) as running:
        yield running


@pytest.fixture
def peers(swarm: LocalSwarm, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Sets the swarm in the environment, and closes the connection that the run shared."""
    monkeypatch.setenv("SWARM_INITIAL_PEERS", " ".join(swarm.initial_peers))
    # Losses are compared bit by bit, whatever servers took before.
    monkeypatch.setattr(BatchCall, "_options", lambda _self, _chain, least: [least])
    yield swarm.initial_peers
    connect(swarm.initial_peers, SwarmConfig()).close()
    monkeypatch.undo()


def with_lora(base: Any) -> Any:
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer of the trainable parameters."""
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)


class Tuner(pl.LightningModule):
    """LoRA on a model that is loaded where Lightning asks for it; records losses and logits."""

    def __init__(self, directory: Path, loader: Any) -> None:
        super().__init__()
        self.directory = directory
        self.loader = loader
        self.losses: list[float] = []
        self.logits: Tensor | None = None

    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.model = with_lora(self.loader.from_pretrained(self.directory))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        output = self.model(input_ids=batch, labels=batch)
        self.logits = output.logits
        self.losses.append(float(output.loss.detach()))
        loss: Tensor = output.loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def quiet_trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fabric_losses(fabric: L.Fabric, tuned: Any, num_steps: int) -> list[float]:
    """Trains on the same rows again and again."""
    module, optimizer = fabric.setup(tuned, adamw(tuned))
    losses = []
    for _ in range(num_steps):
        loss = module(input_ids=ROWS[:4], labels=ROWS[:4]).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
