"""A swarm, an adapter and a Trainer, cell by cell, as in a notebook.

VS Code, Spyder and Jupyter (through jupytext) run the cells that start with ``# %%``; ``python
examples/notebook_style.py`` runs them all.
"""

# %%
import sys
from pathlib import Path

import swarm_plugins
from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

BASE = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
TEXT = (Path(__file__).parent / "data" / "gettysburg.txt").read_text()

# %% A swarm of two servers on this machine. To join an existing one, its address is enough.
swarm = LocalSwarm(BASE, num_servers=2, threads=1)
swarm.start()
print(swarm.initial_peers)


# %% An ordinary module that loads its model in configure_model, where it finds the strategy's swarm.
class Tuner(L.LightningModule):
    """Trains a LoRA."""

    def configure_model(self) -> None:
        """Loads the model once."""
        if not hasattr(self, "model"):
            base = AutoSwarmModelForCausalLM.from_pretrained(BASE)
            self.model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Returns the loss."""
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW over the adapter."""
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=2e-3)


# %% Real text in pieces of 32 tokens.
tokenizer = AutoTokenizer.from_pretrained(BASE)
tokens = torch.tensor(tokenizer(TEXT)["input_ids"])
pieces = torch.utils.data.DataLoader(tokens[: len(tokens) // 32 * 32].view(-1, 32), batch_size=4)  # type: ignore[arg-type]

# %% Training: the strategy joins the swarm when it starts.
tuner = Tuner()
trainer = L.Trainer(
    strategy=swarm_plugins.SwarmStrategy(initial_peers=swarm.initial_peers),
    accelerator="cpu",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(tuner, pieces)

# %% Generate with the same model object.
prompt = tokenizer("Four score and seven years ago", return_tensors="pt")
output = tuner.model.generate(**prompt, max_new_tokens=16, do_sample=False, pad_token_id=tokenizer.eos_token_id)
print(tokenizer.decode(output[0], skip_special_tokens=True))

# %% Stop the swarm.
swarm.close()
