"""Preferences: a LoRA that prefers the language of early addresses of US presidents, by trl's DPOTrainer.

```console
pip install -c constraints.txt -e '.[demo]' trl    # the text, and trl
export SWARM_INITIAL_PEERS=/ip4/...                # as `swarm serve MODEL` prints it
python recipes/dpo.py
```

Each pair has a paragraph from before 1850 (chosen) and one from 1970 or later (rejected). Every eighth address is held
out. The reference is the model without its adapter, on the same servers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.recipes import load_rows, split_by_document
from swarm_plugins.recipes.preferences import eras_in_pairs

from peft import LoraConfig
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

BATCH = 4
HELD_OUT_PAIRS = 32


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="directory or id on the Hub")
    parser.add_argument("--steps", type=int, default=24, help="training steps")
    parser.add_argument("--pairs", type=int, default=HELD_OUT_PAIRS, help="held-out pairs to measure")
    parser.add_argument("--length", type=int, default=64, help="tokens of prompt and paragraph, at most")
    parser.add_argument("--output", type=Path, default=Path("runs/dpo"), help="where the adapter goes")
    return parser.parse_args()


def show(step: int, found: dict[str, Any]) -> None:
    """Prints what trl measured on held-out pairs."""
    margin, share = found["eval_rewards/margins"], found["eval_rewards/accuracies"]
    print(f"step {step}: held-out loss {found['eval_loss']:.4f}, margin {margin:.3f}, preferred {share:.2f}")


def main() -> None:
    """Trains."""
    options = parse()
    train, held_out = split_by_document(load_rows("sotu", "text", "label"), None)
    held_out_pairs = eras_in_pairs(held_out)
    trainer = DPOTrainer(
        AutoSwarmModelForCausalLM.from_pretrained(options.base),
        args=DPOConfig(
            output_dir=str(options.output),
            max_steps=options.steps,
            max_length=options.length,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=8,
            learning_rate=2e-4,
            beta=0.1,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            bf16=False,
        ),
        train_dataset=eras_in_pairs(train),
        eval_dataset=held_out_pairs.select(range(min(options.pairs, len(held_out_pairs)))),
        processing_class=AutoTokenizer.from_pretrained(options.base),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    show(0, trainer.evaluate())
    trainer.train()
    show(options.steps, trainer.evaluate())
    trainer.model.save_pretrained(options.output / "adapter", save_embedding_layers=False)


if __name__ == "__main__":
    main()
