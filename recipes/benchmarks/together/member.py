"""One Trainer of ``recipes.benchmarks together``, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from recipes.benchmarks.together.records import Job, Ready, Trained
from swarm_plugins.child import answer, jobs
from swarm_plugins.recipes import AdapterTuner, TextData
from swarm_plugins.strategy.swarm.unified import SwarmStrategy
from swarm_plugins.together import RunConfig

_BATCH = 1
_LENGTH = 64
_HELD_OUT = 32
"""Held-out batches of each look, evenly spread."""


class _Looks(pl.Callback):
    """Keeps adapters on the way, and ends training."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._began = 0.0
        self.seconds: list[float] = []
        self.adapters: list[list[Tensor]] = []
        self.rounds, self.digest = 0, ""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        # Before the run is joined: whoever comes late begins with what the others have trained by then.
        self.look(trainer, pl_module, 0.0)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._began = time.monotonic()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        passed_s = time.monotonic() - self._began
        if passed_s >= self._job.seconds:
            trainer.should_stop = True  # the last look comes after the end of the run
        elif passed_s >= self._job.seconds * len(self.seconds) / self._job.looks:
            self.look(trainer, pl_module, passed_s)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer, pl_module, time.monotonic() - self._began)
        run = trainer.strategy.shared_run
        if run is not None:
            state = run.state
            self.rounds, self.digest = state.round, state.digest.hex()

    def look(self, trainer: Any, module: nn.Module, passed_s: float) -> None:
        """Keeps the adapter of now; of a run, the shared one."""
        run = trainer.strategy.shared_run
        with nullcontext() if run is None else run.shared:
            self.adapters.append([one.detach().clone() for one in _trained(module)])
        self.seconds.append(passed_s)


def main() -> None:
    """Trains when told to."""
    messages = jobs(Job)
    job = next(messages)
    pl.seed_everything(job.seed, verbose=False)
    tuner = AdapterTuner(
        job.directory,
        adapter={"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
        learning_rate=job.learning_rate,
    )
    data = TextData(
        tokenizer=job.directory,
        length=_LENGTH,
        batch_size=_BATCH,
        num_documents=job.documents,
        part=job.part,
    )
    strategy = SwarmStrategy(
        job.initial_peers,
        run_id=job.run_id,
        run=RunConfig(steps_per_round=job.steps_per_round, straggler_s=30.0, poll_s=0.5),
    )
    looks = _Looks(job)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=[looks, _Start(messages)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(tuner, data)
    losses = _losses(tuner, looks.adapters, data) if job.evaluates else ()
    answer(
        Trained(
            seconds=tuple(looks.seconds),
            losses=tuple(losses),
            steps=trainer.global_step,
            rounds=looks.rounds,
            digest=looks.digest,
        )
    )


class _Start(pl.Callback):
    """Waits, once the model is loaded and before the run is joined, until all members are ready."""

    def __init__(self, messages: Any) -> None:
        self._messages = messages

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        answer(Ready())
        next(self._messages)  # the job once more


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [one for one in module.parameters() if one.requires_grad]


@torch.no_grad()
def _losses(module: Any, adapters: Sequence[Sequence[Tensor]], data: TextData) -> list[float]:
    """Returns the held-out loss per token with each adapter."""
    batches = list(data.val_dataloader())
    batches = batches[:: max(1, len(batches) // _HELD_OUT)]
    module.eval()
    losses = []
    for adapter in adapters:
        for parameter, value in zip(_trained(module), adapter, strict=True):
            parameter.copy_(value)
        losses.append(sum(float(module(**batch).loss) for batch in batches) / len(batches))
    return losses
