"""An adapter goes to the Hub and comes back, on plain transformers, with equal logits.

`python examples/hub_round_trip.py` makes a tiny mixture; give the directory or the id of another one as its argument.
It pushes to a Hub on this machine. For huggingface.co, leave out `endpoint=` and `token=`.
"""

from __future__ import annotations

import sys

import swarm_plugins
from swarm_plugins.backbone import base_version
from swarm_plugins.local_hub import LocalHub
from swarm_plugins.testing import save_tiny

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

BASE = sys.argv[1] if len(sys.argv) > 1 else str(save_tiny("mixtral", "runs/hub_round_trip/model"))
ROWS = torch.randint(3, 100, (8, 16), generator=torch.Generator().manual_seed(0))


class Tuner(L.LightningModule):
    """Trains a LoRA."""

    def configure_model(self) -> None:
        """Loads the model once."""
        if not hasattr(self, "model"):
            base = swarm_plugins.AutoSwarmModelForCausalLM.from_pretrained(BASE)
            self.model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Returns the loss."""
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW over the adapter."""
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)


with LocalHub() as hub, swarm_plugins.LocalSwarm(BASE, num_servers=2, dtype="float32") as swarm:
    publish = swarm_plugins.HubAdapterCallback("me/my-adapter", endpoint=hub.endpoint, token="local")
    strategy = swarm_plugins.SwarmStrategy(initial_peers=swarm.initial_peers)
    tuner = Tuner()
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", max_epochs=2, callbacks=[publish], logger=False)
    trainer.fit(tuner, DataLoader(ROWS, batch_size=4))  # type: ignore[arg-type]
    torch.set_grad_enabled(False)
    plain = AutoModelForCausalLM.from_pretrained(BASE)
    before = plain(ROWS).logits
    [found] = swarm_plugins.find_adapters(base_version(plain), endpoint=hub.endpoint)
    print(f"found {found.repo_id} {found.tag}")
    loaded = swarm_plugins.load_adapter(plain, found.repo_id, found.tag, endpoint=hub.endpoint).eval()
    after, trained = loaded(ROWS).logits, tuner.model.eval()(ROWS).logits
    print(f"the adapter changes logits by {float((after - before).abs().max())}")
    print(f"here and there: difference {float((after - trained).abs().max())}")
