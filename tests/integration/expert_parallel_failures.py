"""What ranks do in the tests of refusals and of lost ranks, and all that two ranks are started for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from expert_parallel_checks import (
    ROWS,
    Tuner,
    as_torchrun,
    by_fabric,
    equal_to_one_process,
    from_parts,
    resumed,
    rows,
    train,
    trainer,
)
from parallel_failures import said
from torch import Tensor
from torch.utils.data import DataLoader

from swarm_plugins import ExpertParallelStrategy


def everything(cases: Sequence[tuple[dict[str, Any], dict[str, Any]]], folder: Path) -> dict[str, Any]:
    """All that a group of two ranks is started for."""
    return {
        "equal": equal_to_one_process(cases),
        "resumed": resumed(folder),
        "fabric": by_fabric(folder),
        "parts": from_parts(folder),
        "refused": refusals(),
    }


def refusals() -> dict[str, str]:
    """What each rank says to settings that cannot work; afterwards the ranks still train."""
    world_size = dist.get_world_size()
    as_torchrun(world_size, dist.get_rank())

    def fit(module: pl.LightningModule, strategy: Any = "expert_parallel", **options: Any) -> None:
        trainer(strategy, world_size, None, **options).fit(module, rows(world_size))

    uneven = DataLoader(ROWS[:5], batch_size=1)  # type: ignore[arg-type]
    found = {
        "size": said(fit, Tuner(), ExpertParallelStrategy(3)),
        "tp": said(fit, Tuner(), ExpertParallelStrategy(tp_size=3)),
        "no mixture": said(fit, Dense()),
        "one rank's module": said(fit, Tuner() if dist.get_rank() else Tuner("qwen3_moe")),
        "batch norm": said(fit, Tuner(), sync_batchnorm=True),
        "batches": said(trainer("expert_parallel", world_size, None).predict, Predictor(), uneven),
        "after an error": said(fit, Saving()),
    }
    module, _ = train("expert_parallel", world_size, world_size, max_steps=1)
    return {**found, "then": f"{len(module.losses)} losses"}


class Dense(Tuner):
    def build(self) -> None:
        self.model = torch.nn.Linear(2, 2)


class Predictor(Tuner):
    def predict_step(self, batch: Tensor, _: int) -> Tensor:
        return self.loss(batch)


class Saving(Tuner):
    """Fails, and has a callback that would save then."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        raise ValueError("a bad batch")

    def configure_callbacks(self) -> list[pl.Callback]:
        class Save(pl.Callback):
            def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
                trainer.save_checkpoint("never.ckpt")

        return [Save()]


class Dying(Tuner):
    """Rank 1 is killed in its third batch."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if dist.get_rank() == 1 and index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, index)


def rank_dies() -> tuple[str, float]:
    """What the other rank says, and after how many seconds."""
    torch.manual_seed(0)
    as_torchrun(dist.get_world_size(), dist.get_rank())
    one = trainer(ExpertParallelStrategy(timeout_s=10), dist.get_world_size(), None)
    start = time.monotonic()
    return said(one.fit, Dying(), rows(dist.get_world_size())), time.monotonic() - start
