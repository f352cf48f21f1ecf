"""A Trainer that takes part in a run, in a process of its own; prints a line of JSON for each round.

Arguments: directory of the model, and settings as JSON. It begins, and ends, when its standard input says so.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import trainer_kit
from torch import Tensor
from torch.utils.data import DataLoader

from swarm_plugins import AutoSwarmModelForCausalLM, HubAdapterCallback, RunConfig, SwarmStrategy
from swarm_plugins.together import shared_run


class Member(trainer_kit.Tuner):
    """Tells what happens, and takes as long for a step as it is told."""

    def __init__(self, directory: Path, step_s: float) -> None:
        super().__init__(directory, AutoSwarmModelForCausalLM)
        self.step_s = step_s
        self._told: bytes | None = None

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        time.sleep(self.step_s)
        return super().training_step(batch, number)

    def on_train_batch_end(self, *_: Any) -> None:
        self.tell()
        self.trainer.should_stop = self.trainer.should_stop or told_to_end.is_set()

    @property
    def _run(self) -> Any:
        return self.trainer.strategy.shared_run

    def tell(self) -> None:
        state, progress = self._run.peer.round.state, self._run.progress
        if state.digest != self._told:
            self._told = state.digest
            record = self._run.peer._last_record
            counted = 0 if record is None else len(record.contributions)
            say(
                round=state.round,
                digest=state.digest.hex(),
                peers=progress.peers,
                late=len(progress.late),
                publishes=self._run.is_publisher,
                counted=counted,
                loss=self.losses[-1],
            )


def say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def garbage(changes: list[np.ndarray]) -> bytes:
    """An update that is as large as can be without being refused, and points anywhere."""
    random = np.random.default_rng()
    return plain_update([np.asarray(random.uniform(-99, 99, size=one.shape), np.float32) for one in changes])


plain_update = shared_run.write_update
told_to_end = threading.Event()


def listen() -> None:
    sys.stdin.readline()
    told_to_end.set()


def main(directory: str, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if settings.get("sends_garbage"):
        shared_run.write_update = garbage  # type: ignore[assignment]
    rows = torch.randint(3, 100, (64, 12), generator=torch.Generator().manual_seed(settings["seed"]))
    hub = settings.get("hub")
    publisher = HubAdapterCallback("me/adapter", on=["end"], endpoint=hub, token="any") if hub else None
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        max_epochs=-1,
        min_steps=1,
        strategy=SwarmStrategy(run_id="me/run", run=RunConfig(**settings["run"])),
        callbacks=[publisher] if publisher else [],
        default_root_dir=settings.get("folder"),
    )
    say(ready=True)
    sys.stdin.readline()
    threading.Thread(target=listen, daemon=True).start()
    trainer.fit(Member(Path(directory), settings.get("step_s", 0.0)), DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    say(pushed=len(publisher.pushed) if publisher else 0)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
