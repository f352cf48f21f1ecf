"""transformers.Trainer, unchanged: checkpoints hold the adapter only, and resume as usual.

```console
export SWARM_INITIAL_PEERS=/ip4/...    # as `swarm serve MODEL` prints it
python examples/transformers_trainer.py
```
"""

from __future__ import annotations

import sys
from pathlib import Path

from swarm_plugins import AutoSwarmModelForCausalLM

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

BASE = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
TEXT = (Path(__file__).parent / "data" / "gettysburg.txt").read_text()

tokenizer = AutoTokenizer.from_pretrained(BASE)
sentences = Dataset.from_dict({"text": [part.strip() + "." for part in TEXT.split(".") if part.strip()]})
rows = sentences.map(lambda row: tokenizer(row["text"]), remove_columns=["text"])

base = AutoSwarmModelForCausalLM.from_pretrained(BASE)
model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir="runs/transformers_trainer",
        per_device_train_batch_size=4,
        max_steps=6,
        logging_steps=1,
        learning_rate=2e-3,
        save_steps=3,
        report_to="none",
        use_cpu=True,
    ),
    train_dataset=rows,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
print(trainer.train().metrics)
