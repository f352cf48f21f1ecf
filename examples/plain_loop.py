"""An ordinary PyTorch loop; the decoder layers run on servers.

```console
swarm serve HuggingFaceTB/SmolLM2-135M-Instruct    # in another terminal, or on other machines
export SWARM_INITIAL_PEERS=/ip4/...                # as it prints
python examples/plain_loop.py
```
"""

from __future__ import annotations

import sys
from pathlib import Path

from swarm_plugins import AutoSwarmModelForCausalLM

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

BASE = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
TEXT = (Path(__file__).parent / "data" / "gettysburg.txt").read_text()

torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(BASE)
base = AutoSwarmModelForCausalLM.from_pretrained(BASE)  # joins the swarm of SWARM_INITIAL_PEERS
model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
model.print_trainable_parameters()

tokens = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :256]
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-3)
for step in range(10):
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")

model.save_pretrained("runs/plain_loop", save_embedding_layers=False)  # an ordinary PEFT adapter
