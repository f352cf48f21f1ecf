"""Two processes train one adapter, each with batches of its own; the decoder layers run on servers.

```console
export SWARM_INITIAL_PEERS=/ip4/...                # as `swarm serve` prints it; or SWARM_OFFLOAD=fast=8GB
python examples/several_processes.py --devices 2   # Lightning starts the second process
```
"""

from __future__ import annotations

import argparse
from pathlib import Path

from swarm_plugins import AutoSwarmModelForCausalLM

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("base", nargs="?", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--devices", type=int, default=2, help="processes; the rows of a step are shared by them")
options = parser.parse_args()
ROWS = 4  # in each step, of all processes together


class Tuner(L.LightningModule):
    """Knows nothing of processes."""

    def configure_model(self) -> None:
        """Loads the model once."""
        if not hasattr(self, "model"):
            base = AutoSwarmModelForCausalLM.from_pretrained(options.base)
            self.model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Returns the loss; logs its mean over all processes."""
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("loss", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW over the adapter."""
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=2e-3)


text = (Path(__file__).parent / "data" / "gettysburg.txt").read_text()
tokens = torch.tensor(AutoTokenizer.from_pretrained(options.base)(text)["input_ids"])
pieces = DataLoader(tokens[: len(tokens) // 32 * 32].view(-1, 32), batch_size=ROWS // options.devices)  # type: ignore[arg-type]
L.seed_everything(0)
trainer = L.Trainer(strategy="swarm", accelerator="cpu", devices=options.devices, max_epochs=2, logger=False)
tuner = Tuner()
trainer.fit(tuner, pieces)
if trainer.is_global_zero:
    print(f"{trainer.world_size} processes: loss {trainer.callback_metrics['loss']:.4f}")
    tuner.model.save_pretrained("runs/several_processes", save_embedding_layers=False)
