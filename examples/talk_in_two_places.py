"""A trained adapter answers `swarm chat`, `swarm run` and `swarm api`, on a swarm and offloaded, as it does in memory.

`python examples/talk_in_two_places.py` makes a tiny mixture; give the directory or the id of another as its argument.
It needs the extra ``web``.
"""

from __future__ import annotations

import subprocess
import sys

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm
from swarm_plugins.testing import save_tiny

import torch
from openai import OpenAI
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

BASE = sys.argv[1] if len(sys.argv) > 1 else str(save_tiny("mixtral", "runs/talk/model"))
SWARM, ADAPTER, PROMPT = [sys.executable, "-m", "swarm_plugins"], "runs/talk/adapter", "Four score"


def in_memory() -> str:
    """Makes an adapter, as training would, and returns what it writes."""
    torch.manual_seed(0)
    base = AutoSwarmModelForCausalLM.from_pretrained(BASE, offload="none")
    model = get_peft_model(base, LoraConfig(target_modules=["o_proj"], init_lora_weights=False))
    model.save_pretrained(ADAPTER)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    text = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.eval().generate(**text, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(tokens[0, text["input_ids"].shape[1] :], skip_special_tokens=True))


def typed(*words: str) -> str:
    """Returns what a command prints."""
    say = ["--adapter", ADAPTER, "--prompt", PROMPT, "--max-new-tokens", "12", "--temperature", "0"]
    return subprocess.run([*SWARM, *words, *say], stdout=subprocess.PIPE, text=True, check=True).stdout


def asked(*place: str) -> str:
    """Returns the answer of an API."""
    command = [*SWARM, "api", BASE, *place, "--port", "0", "--name", "base", "--adapter", ADAPTER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as api:
        address = next(line for line in api.stdout or () if "listening at" in line).split()[2]
        client = OpenAI(base_url=f"{address}/v1", api_key="none")
        answer = client.completions.create(model=f"base:{ADAPTER}", prompt=PROMPT, max_tokens=12, temperature=0)
        api.terminate()
    return answer.choices[0].text


expected, disk = in_memory(), ["--offload", "fast=100KB"]
with LocalSwarm(BASE, num_servers=1, dtype="float32") as swarm:
    peers = ["--initial-peers", swarm.initial_peers[0]]
    answers = {"swarm chat": typed("chat", BASE, *peers), "swarm api": asked(*peers)}
answers |= {"swarm run, offloaded": typed("run", BASE, *disk), "swarm api, offloaded": asked(*disk)}
for name, answer in answers.items():
    print(f"{name}: {answer.strip()!r}, equal: {answer.strip() == expected.strip()}")
