"""Rewards: a LoRA whose summaries keep to the words of the text, by trl's GRPOTrainer.

```console
pip install -c constraints.txt -e '.[demo]' trl    # the text, and trl
export SWARM_INITIAL_PEERS=/ip4/...                # as `swarm serve MODEL` prints it
python recipes/grpo.py
```

The texts are beginnings of paragraphs from addresses of US presidents; every eighth address is held out. The model's
own samples come over the swarm, with the adapter as it is trained.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.recipes import load_rows, split_by_document
from swarm_plugins.recipes.rewards import faithful, summaries

from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

HELD_OUT_TEXTS = 16


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="directory or id on the Hub")
    parser.add_argument("--steps", type=int, default=30, help="training steps")
    parser.add_argument("--texts", type=int, default=HELD_OUT_TEXTS, help="held-out texts to measure")
    parser.add_argument("--new-tokens", type=int, default=20, help="tokens of a summary, at most")
    parser.add_argument("--output", type=Path, default=Path("runs/grpo"), help="where the adapter goes")
    return parser.parse_args()


def main() -> None:
    """Trains."""
    options = parse()
    train, held_out = split_by_document(load_rows("sotu", "text"), None)
    held_out_prompts = summaries(held_out)
    tokenizer = AutoTokenizer.from_pretrained(options.base, padding_side="left")
    trainer = GRPOTrainer(
        AutoSwarmModelForCausalLM.from_pretrained(options.base),
        reward_funcs=faithful,
        args=GRPOConfig(
            output_dir=str(options.output),
            max_steps=options.steps,
            max_completion_length=options.new_tokens,
            num_generations=4,
            per_device_train_batch_size=8,  # answers: two texts at a time
            num_generations_eval=2,
            per_device_eval_batch_size=8,
            learning_rate=1e-3,
            beta=0.0,  # above 0 the loss holds the model near the one without the adapter, for one more forward
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=False,
        ),
        train_dataset=summaries(train),
        eval_dataset=held_out_prompts.select(range(min(options.texts, len(held_out_prompts)))),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    print(f"step 0: held-out reward {trainer.evaluate()['eval_reward']:.3f}")
    trainer.train()
    print(f"step {options.steps}: held-out reward {trainer.evaluate()['eval_reward']:.3f}")
    trainer.model.save_pretrained(options.output / "adapter", save_embedding_layers=False)


if __name__ == "__main__":
    main()
