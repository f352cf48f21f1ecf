"""Trainer(strategy="swarm") and Fabric(strategy="swarm") over real servers give what a local run gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm, SwarmConfig
from swarm_plugins.client import connect
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError
from swarm_plugins.testing.models import save_tiny

pytestmark = [pytest.mark.swarm, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]

ROWS = torch.randint(3, 100, (8, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("mixtral", tmp_path_factory.mktemp("models") / "tiny-mixtral")


@pytest.fixture(scope="module")
def swarm(model: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(model, num_servers=2) as running:
        yield running
        # What the strategies of all tests shared.
        connect(running.initial_peers, SwarmConfig()).close()


@pytest.fixture(autouse=True)
def _peers(swarm: LocalSwarm, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SWARM_INITIAL_PEERS", " ".join(swarm.initial_peers))
    yield
    connect(swarm.initial_peers, SwarmConfig()).close()
    monkeypatch.undo()


class Tuner(pl.LightningModule):
    """LoRA on a model that is loaded where Lightning says."""

    def __init__(self, directory: Path, loader: Any) -> None:
        super().__init__()
        self.directory = directory
        self.loader = loader
        self.losses: list[float] = []

    def configure_model(self) -> None:
        torch.manual_seed(0)
        base = self.loader.from_pretrained(self.directory)
        self.model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def trainer(folder: Path, strategy: str, epochs: int, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        strategy=strategy,
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
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


@pytest.mark.parametrize("options", [{"devices": 2}, {"precision": "16-true"}], ids=["devices", "16-true"])
def test_settings_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=r"devices|16-true"):
        pl.Trainer(strategy="swarm", accelerator="cpu", logger=False, **options).fit(pl.LightningModule())


def test_fabric_trains_too(model: Path) -> None:
    fabric = L.Fabric(strategy="swarm", accelerator="cpu", devices=1)
    fabric.launch()
    with fabric.init_module():
        torch.manual_seed(0)
        base = AutoSwarmModelForCausalLM.from_pretrained(model)
    tuned = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    module, optimizer = fabric.setup(
        tuned, torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
    )
    losses = []
    for _ in range(3):
        loss = module(input_ids=ROWS[:4], labels=ROWS[:4]).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("root", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("first", ["swarm_plugins", "lightning"])
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
