"""trl's SFTTrainer on questions and answers; it adds the adapter itself.

```console
pip install trl
export SWARM_INITIAL_PEERS=/ip4/...    # as `swarm serve MODEL` prints it
python examples/trl_sft.py
```
"""

from __future__ import annotations

import sys

from swarm_plugins import AutoSwarmModelForCausalLM

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

BASE = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
FACTS = {
    "Where do the blocks run?": "On the servers of a swarm.",
    "Where does the adapter stay?": "On the machine that trains it.",
    "Who changes the weights of a server?": "No one.",
    "What is a span?": "Consecutive blocks on one server.",
}

rows = Dataset.from_dict({"prompt": [f"{question}\n" for question in FACTS], "completion": list(FACTS.values())})
trainer = SFTTrainer(
    AutoSwarmModelForCausalLM.from_pretrained(BASE),
    args=SFTConfig(
        output_dir="runs/trl_sft",
        per_device_train_batch_size=2,
        max_steps=4,
        logging_steps=1,
        learning_rate=2e-3,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=rows,
    processing_class=AutoTokenizer.from_pretrained(BASE),
    peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
)
print(trainer.train().metrics)
