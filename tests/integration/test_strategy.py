"""Trainer(strategy="swarm") and Fabric(strategy="swarm") over real servers match a local run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
import trainer_kit
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from trainer_kit import ROWS, Tuner, fabric_losses, quiet_trainer, with_lora
from transformers import AutoModelForCausalLM

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.usefixtures("peers"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]
# Fixtures.
model, swarm, peers = trainer_kit.model, trainer_kit.swarm, trainer_kit.peers


def trainer(folder: Path, strategy: str, epochs: int, **options: Any) -> pl.Trainer:
    return quiet_trainer(
        strategy=strategy,
        max_epochs=epochs,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="last", save_top_k=-1)],
        **options,
    )


def data() -> DataLoader[Any]:
    return DataLoader(ROWS, batch_size=4)  # type: ignore[arg-type]


def test_losses_and_resume_equal_a_local_run(model: Path, tmp_path: Path) -> None:
    local = Tuner(model, AutoModelForCausalLM)
    trainer(tmp_path / "local", "auto", 4).fit(local, data())
    straight = Tuner(model, AutoSwarmModelForCausalLM)
    trainer(tmp_path / "straight", "swarm", 4).fit(straight, data())
    # The same kernels in the same order, in other processes.
    assert straight.losses == pytest.approx(local.losses, rel=1e-5)
    assert straight.losses[-1] < straight.losses[0]

    first = Tuner(model, AutoSwarmModelForCausalLM)
    trainer(tmp_path / "first", "swarm", 2).fit(first, data())
    checkpoint = tmp_path / "first" / "last.ckpt"
    names = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert names
    assert all("lora_" in name for name in names)
    second = Tuner(model, AutoSwarmModelForCausalLM)
    trainer(tmp_path / "second", "swarm", 4).fit(second, data(), ckpt_path=checkpoint)
    assert first.losses + second.losses == straight.losses


def test_a_checkpoint_of_another_base_is_refused(model: Path, tmp_path: Path, swarm: LocalSwarm) -> None:
    tuner = Tuner(model, AutoSwarmModelForCausalLM)
    trainer(tmp_path, "swarm", 1).fit(tuner, data())
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    checkpoint["swarm_plugins"]["base"] = ["tiny-mixtral@local-" + "0" * 40]
    torch.save(checkpoint, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match="0" * 40):
        trainer(tmp_path, "swarm", 2).fit(
            Tuner(model, AutoSwarmModelForCausalLM), data(), ckpt_path=tmp_path / "other.ckpt"
        )


def test_a_module_without_remote_blocks_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="AutoSwarmModel"):
        trainer(tmp_path, "swarm", 1).fit(Tuner(model, AutoModelForCausalLM), data())


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="16-true"):
        pl.Trainer(strategy="swarm", accelerator="cpu", logger=False, precision="16-true").fit(pl.LightningModule())


def test_fabric_trains_too(model: Path) -> None:
    fabric = L.Fabric(strategy="swarm", accelerator="cpu", devices=1)
    fabric.launch()
    with fabric.init_module():
        base = AutoSwarmModelForCausalLM.from_pretrained(model)
    losses = fabric_losses(fabric, with_lora(base), 3)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("first", "root"), [("swarm_plugins", "lightning.pytorch"), ("lightning", "pytorch_lightning")]
)
def test_the_name_is_known_in_both_spellings_and_import_orders(root: str, first: str) -> None:
    imports = ["import swarm_plugins", f"import {root} as pl"]
    code = "\n".join(
        [
            *(imports if first == "swarm_plugins" else imports[::-1]),
            "pl.Trainer(strategy='swarm', accelerator='cpu', logger=False)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
