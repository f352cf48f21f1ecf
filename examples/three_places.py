"""One LightningModule trains a mixture's LoRA on a swarm, offloaded and in memory, and goes on in another place."""

from __future__ import annotations

import sys
from typing import Any

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm, SwarmConfig, SwarmStrategy
from swarm_plugins.testing import save_tiny

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader

BASE = sys.argv[1] if len(sys.argv) > 1 else str(save_tiny("mixtral", "runs/three_places/model"))
torch.set_num_threads(1)  # as a server has, and batches in one piece: sums in another order round otherwise
ROWS = torch.randint(3, 100, (8, 16), generator=torch.Generator().manual_seed(0))


class Tuner(L.LightningModule):
    """Does not know where its blocks are."""

    def configure_model(self) -> None:
        """Loads the model and adds an adapter."""
        torch.manual_seed(0)
        base = AutoSwarmModelForCausalLM.from_pretrained(BASE)
        self.model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Returns the loss, and keeps it."""
        self.loss: torch.Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return self.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW over the adapter."""
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=2e-3)


def train(place: dict[str, Any], epochs: int, resume: str | None = None) -> tuple[torch.Tensor, str]:
    """Returns the last loss and all weights of the adapter, in one row, and the checkpoint."""
    tuner, checkpoints = Tuner(), ModelCheckpoint("runs/three_places", save_top_k=-1)
    where = SwarmStrategy(**place)
    trainer = L.Trainer(strategy=where, accelerator="cpu", max_epochs=epochs, logger=False, callbacks=[checkpoints])
    trainer.fit(tuner, DataLoader(ROWS, batch_size=4), ckpt_path=resume)  # type: ignore[arg-type]
    trained = [tuner.loss, *(p for p in tuner.parameters() if p.requires_grad)]
    return torch.cat([one.detach().flatten() for one in trained]), checkpoints.best_model_path


with LocalSwarm(BASE, num_servers=2, dtype="float32") as swarm:
    places: dict[str, dict[str, Any]] = {"offloaded": {"offload": "fast=100KB"}, "in memory": {"offload": "none"}}
    places["swarm"] = {"initial_peers": swarm.initial_peers, "swarm": SwarmConfig(micro_batches=1)}
    expected, _ = train(places["swarm"], epochs=4)  # of two steps
    _, half = train(places["in memory"], epochs=2)
    for name, place in places.items():
        whole, resumed = train(place, epochs=4)[0], train(place, epochs=4, resume=half)[0]
        for what, found in {"8 steps": whole, "4 steps in memory and 4 here": resumed}.items():
            print(f"{name}, {what}: difference {float((found - expected).abs().max())}")
