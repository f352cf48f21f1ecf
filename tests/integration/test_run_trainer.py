"""What a run that is trained together does to one Trainer: validation, samples, metrics, the published adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import trainer_kit
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from swarm_plugins import AutoSwarmModelForCausalLM, HubAdapterCallback, RunConfig, SwarmStrategy
from swarm_plugins.local_hub import LocalHub

pytestmark = trainer_kit.IN_A_RUN
model, swarm, peers = trainer_kit.model, trainer_kit.swarm, trainer_kit.peers


class Tuner(trainer_kit.Tuner):
    def validation_step(self, batch: Tensor, _: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)


class Watch(pl.Callback):
    """Compares the module's weights with the shared ones, in and around each validation."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, bool]] = []
        self.metrics: list[dict[str, float]] = []
        self.has_kept_own: list[bool] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.own = weights(module)
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.sanity_checking:
            return  # the run has not been joined yet
        state, here = trainer.strategy.shared_run.state, weights(module)
        is_shared = all(map(np.array_equal, here, [one.reshape(-1) for one in state.weights]))
        self.seen.append((trainer.global_step, state.round, is_shared))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.has_kept_own.append(all(map(np.array_equal, weights(module), self.own)))


def weights(module: torch.nn.Module) -> list[Any]:
    return [one.detach().numpy().reshape(-1).copy() for one in module.parameters() if one.requires_grad]


def test_a_trainer_shows_counts_and_publishes_what_all_share(model: Path, tmp_path: Path) -> None:
    """Seven steps of two batches of two rows, three steps a round; a validation after every fourth batch."""
    watch = Watch()
    tuner = Tuner(model, AutoSwarmModelForCausalLM)
    with LocalHub() as hub:
        publisher = HubAdapterCallback(
            "me/adapter", on=["best", "end"], monitor="val_loss", endpoint=hub.endpoint, token="any"
        )
        trainer = trainer_kit.quiet_trainer(
            strategy=SwarmStrategy(run_id="me/run", run=RunConfig(steps_per_round=3, poll_s=0.25)),
            max_steps=7,
            accumulate_grad_batches=2,
            val_check_interval=4,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=1,
            enable_checkpointing=False,
            callbacks=[watch, publisher],
            default_root_dir=tmp_path,
        )
        rows = trainer_kit.ROWS
        trainer.fit(tuner, DataLoader(rows, batch_size=2), DataLoader(rows[:2], batch_size=2))  # type: ignore[arg-type]
        assert publisher.pushed
    run = trainer.strategy.shared_run
    assert watch.seen == [(2, 0, True), (4, 1, True), (6, 2, True)]
    assert watch.has_kept_own == [True, True, True]
    assert (run.state.round, run.state.samples) == (3, 28)
    steps = [one for one in watch.metrics if "run/round" in one]
    assert {one["run/peers"] for one in steps} == {1.0}
    assert (steps[-1]["run/round"], steps[-1]["run/samples"], steps[-1]["run/late"]) == (2.0, 28.0, 0.0)
    # Published is what the module has at the end, which is what all peers have.
    folder = publisher.pushed[-1].folder
    kept = load_file(folder / "adapter_model.safetensors")
    assert sorted(float(one.sum()) for one in kept.values()) == sorted(
        float(torch.from_numpy(one).sum()) for one in weights(tuner)
    )
    assert all(map(np.array_equal, weights(tuner), [one.reshape(-1) for one in run.state.weights]))
