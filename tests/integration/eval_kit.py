"""Three versions of an adapter on a local Hub, and a task for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from swarm_plugins.callbacks.publishing import Publishing
from swarm_plugins.local_hub import LocalHub

TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: capitals.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: ["rome", "paris", "oslo"]
metric_list:
  - metric: acc
"""
PLACES = ("italy", "gaul", "norway", "the empire", "france", "the north", "spain", "bohemia")


def write_task(folder: Path, name: str = "capitals") -> Path:
    """Writes a task of eight questions with three choices, and its data next to it."""
    lines = [
        json.dumps({"question": f"the capital of {place} is", "answer": index % 3})
        for index, place in enumerate(PLACES)
    ]
    (folder / "capitals.jsonl").write_text("\n".join(lines))
    file = folder / f"{name}.yaml"
    file.write_text(TASK.format(name=name))
    return file


def publish_versions(
    hub: LocalHub, base_dir: Path, folder: Path, number: int = 3, *, repo_id: str = "me/adapter", **options: Any
) -> Publishing:
    """Publishes versions whose tensors differ."""
    base = AutoModelForCausalLM.from_pretrained(base_dir)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    publisher = Publishing(repo_id, endpoint=hub.endpoint, token="any", **options)
    publisher.begin(model, folder)
    for step in range(1, number + 1):
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if "lora_" in name:
                    torch.nn.init.normal_(tensor, std=0.3 * step)
        publisher.publish("save", step, {"loss": 1.0 / step})
    publisher.finish()
    return publisher
