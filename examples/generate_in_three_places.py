"""A trained adapter writes with generate() and pipeline() on a swarm, offloaded and in memory: the same tokens.

`python examples/generate_in_three_places.py` makes a tiny mixture; give the directory or the id of another one as its
argument.
"""

from __future__ import annotations

import sys
from typing import Any

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm, load_adapter
from swarm_plugins.testing import save_tiny

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, pipeline

BASE = sys.argv[1] if len(sys.argv) > 1 else str(save_tiny("mixtral", "runs/generate/model"))
PROMPT = "Four score and seven years ago"
tokenizer = AutoTokenizer.from_pretrained(BASE)
text = tokenizer(PROMPT, return_tensors="pt")


def trained() -> None:
    """Trains a LoRA for a few steps in memory, and saves it."""
    torch.manual_seed(0)
    base = AutoSwarmModelForCausalLM.from_pretrained(BASE, offload="none")
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    for _ in range(8):
        model(**text, labels=text["input_ids"], use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained("runs/generate/adapter")


def written(**place: Any) -> tuple[list[int], str]:
    """Returns the tokens of generate() and the text of pipeline()."""
    base = AutoSwarmModelForCausalLM.from_pretrained(BASE, **place)
    model = load_adapter(base, "runs/generate/adapter").eval()
    tokens = model.generate(**text, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    write = pipeline("text-generation", model=model, tokenizer=tokenizer, device=model.device)
    [answer] = write(PROMPT, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokens[0].tolist(), answer["generated_text"]


trained()
with LocalSwarm(BASE, num_servers=2, dtype="float32") as swarm:
    places: dict[str, dict[str, Any]] = {"a swarm": {"initial_peers": swarm.initial_peers}}
    places |= {"offloaded": {"offload": "fast=100KB"}, "in memory": {"offload": "none"}}
    answers = {name: written(**place) for name, place in places.items()}
for name, answer in answers.items():
    print(f"{name}: {answer[1]!r}, equal: {answer == answers['in memory']}")
