"""Serve a model with two servers, tune a LoRA through them, generate, save: a few minutes on one machine.

Two server processes hold the decoder layers of SmolLM2-135M-Instruct, and this process holds the rest. `--help` shows
the options; `swarm demo` goes further.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm
from swarm_plugins.demo import smollm2

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tqdm import tqdm
from transformers import AutoTokenizer

TEXT = Path(__file__).parent / "data" / "gettysburg.txt"
PROMPT = "Four score and seven years ago"
SEED = 0


def batches(tokens: torch.Tensor, *, rows: int, length: int, steps: int) -> Iterator[torch.Tensor]:
    """Yields random pieces of a text, ``[rows, length]``."""
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - length, (rows,), generator=generator)
        yield torch.stack([tokens[start : start + length] for start in starts])


def mean_loss(model: PeftModel, tokens: torch.Tensor, length: int = 64) -> float:
    """Returns the loss over a whole text in pieces of ``length`` tokens, without dropout."""
    model.eval()
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    with torch.no_grad():
        return float(model(input_ids=rows, labels=rows, use_cache=False).loss)


def train(model: PeftModel, tokens: torch.Tensor, steps: int) -> None:
    """Tunes the adapter in an ordinary PyTorch loop."""
    model.train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-3)
    bar = tqdm(batches(tokens, rows=4, length=64, steps=steps), total=steps, desc="   training")
    for batch in bar:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")


def tune_and_generate(directory: Path, swarm: LocalSwarm, steps: int, output: Path) -> None:
    """Does what a client of any swarm does: load, tune, generate, save."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = torch.tensor(tokenizer(TEXT.read_text())["input_ids"])
    base = AutoSwarmModelForCausalLM.from_pretrained(directory, initial_peers=swarm.initial_peers)
    held = sum(tensor.untyped_storage().nbytes() for tensor in base.parameters()) / 2**20
    print(f"   this process holds {held:.0f} MiB of {type(base).__name__}: embeddings, norm and head")

    print(f"3. {steps} steps of LoRA on {TEXT.name}: PEFT as usual, a plain training loop.")
    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(base, config)
    before = mean_loss(model, tokens)
    train(model, tokens, steps)
    print(f"   loss on that text: {before:.3f} before, {mean_loss(model, tokens):.3f} after")

    print("4. The same model, generate() as usual.")
    prompt = tokenizer(PROMPT, return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    print(f"   {tokenizer.decode(generated[0], skip_special_tokens=True)!r}")

    model.save_pretrained(output, save_embedding_layers=False)
    print(f"5. An ordinary PEFT adapter is in {output}.")


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="directory of another model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--servers", type=int, default=2, help="servers that share the layers")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--output", type=Path, default=Path("build/quickstart-adapter"), help="where the adapter goes")
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    # Three processes share the cores of this machine.
    torch.set_num_threads(1)
    started = time.monotonic()

    print("1. The model. The first time, it is fetched and converted, which takes a minute or two.")
    directory = arguments.model or smollm2()
    print(f"2. A swarm of {arguments.servers} servers on this machine.")
    with LocalSwarm(directory, num_servers=arguments.servers, threads=1) as swarm:
        for server in swarm.servers:
            print(f"   process {server.pid} serves blocks {server.span[0]} to {server.span[1] - 1}")
        tune_and_generate(directory, swarm, arguments.steps, arguments.output)
    print(f"Done in {time.monotonic() - started:.0f} s; all servers have ended.")


if __name__ == "__main__":
    main()
