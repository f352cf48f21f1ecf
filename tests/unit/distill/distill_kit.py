"""A module with a student as users write it, and its data."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from transformers import PreTrainedModel

ROWS = torch.randint(3, 100, (16, 12), generator=torch.Generator().manual_seed(0))


class Tuner(pl.LightningModule):
    """Trains a student; knows nothing of distillation."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> Any:
    return torch.utils.data.DataLoader(ROWS, batch_size=2)
