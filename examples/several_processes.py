"""Two processes train one adapter, as one process with all rows does; the decoder layers run on servers.

```console
export SWARM_INITIAL_PEERS=/ip4/...                # as `swarm serve` prints it; or SWARM_OFFLOAD=fast=8GB
python examples/several_processes.py --devices 2   # Lightning starts the second process
```
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from swarm_plugins import AutoSwarmModelForCausalLM

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("base", nargs="?", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--devices", type=int, default=2, help="processes; the rows of a step are shared by them")
options = parser.parse_args()
ROWS = 4  # in each step, of all processes together


class Tuner(L.LightningModule):
    """Knows nothing of processes, but for the rows of each."""

    def configure_model(self) -> None:
        base = AutoSwarmModelForCausalLM.from_pretrained(options.base)
        self.model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))

    def train_dataloader(self) -> Any:
        rows: Any = DistributedSampler(pieces, options.devices, self.trainer.global_rank, shuffle=False)  # type: ignore[arg-type]
        return DataLoader(pieces, batch_size=ROWS // options.devices, sampler=rows)  # type: ignore[arg-type]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("loss", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=2e-3)


text = (Path(__file__).parent / "data" / "gettysburg.txt").read_text()
tokens = torch.tensor(AutoTokenizer.from_pretrained(options.base)(text)["input_ids"])
pieces = tokens[: len(tokens) // (32 * ROWS) * 32 * ROWS].view(-1, 32)
L.seed_everything(0)
here: dict[str, Any] = {"accelerator": "cpu", "devices": options.devices, "use_distributed_sampler": False}
trainer = L.Trainer(strategy="swarm", max_epochs=2, logger=False, **here)
trainer.fit(tuner := Tuner())
if trainer.is_global_zero:
    print(f"{trainer.world_size} processes: loss {trainer.callback_metrics['loss']:.7f}")
    tuner.model.save_pretrained("runs/several_processes", save_embedding_layers=False)
