"""A loop with accelerate, in one process or several; the decoder layers run on servers.

```console
export SWARM_INITIAL_PEERS=/ip4/...                # as `swarm serve` prints it; or SWARM_OFFLOAD=fast=8GB
python examples/accelerate_loop.py
accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py    # on CPUs too
```
"""

from __future__ import annotations

import sys
from pathlib import Path

from swarm_plugins import AutoSwarmModelForCausalLM, save_only_trained

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

BASE = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
TEXT = (Path(__file__).parent / "data" / "gettysburg.txt").read_text()
ROWS = 8  # in each step, of all processes together

accelerator = Accelerator(cpu=not torch.cuda.is_available())
save_only_trained(accelerator)  # states without the base, which is read again by its name
set_seed(0)
tokens = torch.tensor(AutoTokenizer.from_pretrained(BASE)(TEXT)["input_ids"])
pieces = tokens[: len(tokens) // 32 * 32].view(-1, 32)
base = AutoSwarmModelForCausalLM.from_pretrained(BASE)
model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-3)
rows = DataLoader(pieces[: len(pieces) // ROWS * ROWS], batch_size=ROWS // accelerator.num_processes)  # type: ignore[arg-type]
model, optimizer, rows = accelerator.prepare(model, optimizer, rows)

for epoch in range(4):
    for batch in rows:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'mean').item():.6f}")

accelerator.save_state("runs/accelerate_loop/state")  # accelerator.load_state goes on, in any number of processes
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained("runs/accelerate_loop/adapter", save_embedding_layers=False)
accelerator.end_training()
