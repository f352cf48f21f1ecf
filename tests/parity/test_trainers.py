"""Programs that know nothing of swarms run unchanged on a model with remote blocks, with the local model's results.

Both sides do the same operations in float32 in the same order, so losses are compared as the programs log them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import pytest
import torch
import trl
from adapter_cases import lora, trained
from datasets import Dataset
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from peft import PeftModel, get_peft_model
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, PreTrainedModel, Trainer, TrainingArguments

STEPS = 6
TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "a stitch in time saves nine",
    "to be or not to be, that is the question",
    "all that glitters is not gold",
    "the early bird catches the worm",
    "actions speak louder than words",
]
few_families = pytest.mark.parametrize("pair", ["llama", "mixtral"], indirect=True)


def settings(output_dir: Path, **changes: Any) -> dict[str, Any]:
    """What every trainer here is told."""
    return {
        "output_dir": str(output_dir),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "seed": 3,
        "disable_tqdm": True,
        **changes,
    }


def tokens(directory: Path) -> tuple[Any, Dataset]:
    """The tokenizer, and the texts as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return tokenizer, Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in TEXTS]})


def losses(trainer: Trainer) -> list[float]:
    """The losses that were logged."""
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert found
    assert all(math.isfinite(loss) for loss in found)
    return found


def with_lora(model: PreTrainedModel, family: str) -> PeftModel:
    """A fresh adapter, the same for the same model: with PEFT's own dropout-free initialisation."""
    torch.manual_seed(11)
    return get_peft_model(model, lora(family, r=4, lora_alpha=16))


def trainer_for(pair, model: PeftModel, output_dir: Path, **changes: Any) -> Trainer:
    """The Trainer of transformers for language modelling."""
    tokenizer, data = tokens(pair.directory)
    return Trainer(
        model=model,
        args=TrainingArguments(**settings(output_dir, **changes)),
        train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )


@few_families
def test_trainer_of_transformers_and_its_resume(pair, tmp_path: Path) -> None:
    local = trainer_for(pair, with_lora(pair.load_local(), pair.family), tmp_path / "local")
    local.train()
    whole = trainer_for(pair, with_lora(pair.load_remote(), pair.family), tmp_path / "whole")
    whole.train()
    assert losses(whole) == losses(local)
    assert losses(whole)[-1] < losses(whole)[0]
    assert whole.state.total_flos == local.state.total_flos

    resumed = trainer_for(pair, with_lora(pair.load_remote(), pair.family), tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses(resumed) == losses(whole)
    for name, parameter in trained(resumed.model).items():
        assert torch.equal(parameter, trained(whole.model)[name])

    saved = {file.name for file in (tmp_path / "whole" / "checkpoint-6").iterdir()}
    assert "adapter_model.safetensors" in saved
    assert not {name for name in saved if name.startswith(("model", "pytorch_model"))}


@few_families
def test_trainer_with_dropout_is_reproducible(pair, tmp_path: Path) -> None:
    found = []
    for number in range(2):
        torch.manual_seed(11)
        model = get_peft_model(pair.load_remote(), lora(pair.family, lora_dropout=0.2))
        trainer = trainer_for(pair, model, tmp_path / str(number), max_steps=3)
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == found[1]


@few_families
@pytest.mark.parametrize("checkpointing", [False, True])
def test_sft_trainer_with_router_loss(pair, checkpointing: bool, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair.directory)
    found = []
    for load, place in ((pair.load_local, "local"), (pair.load_remote, "remote")):
        model = load()
        if pair.family == "mixtral":
            model.config.output_router_logits = True
            model.config.router_aux_loss_coef = 0.5
        torch.manual_seed(11)
        trainer = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(
                **settings(tmp_path / place, save_strategy="no", activation_checkpointing=checkpointing),
                max_length=32,
                bf16=False,
            ),
            train_dataset=Dataset.from_dict({"text": TEXTS}),
            processing_class=tokenizer,
            peft_config=lora(pair.family, r=4, lora_alpha=16),
        )
        trainer.train()
        found.append(trainer)
    local, remote = found
    assert losses(remote) == losses(local)
    if pair.family == "mixtral":
        auxiliary = [[entry["aux_loss"] for entry in t.state.log_history if "aux_loss" in entry] for t in found]
        assert len(auxiliary[0]) == STEPS
        assert auxiliary[1] == pytest.approx(auxiliary[0], rel=1e-5)


TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""
CHOICES = 'doc_to_choice: ["rome", "paris", "oslo"]\n'
UNTIL = (
    "generation_kwargs:\n  until: []\n  max_gen_toks: 8\n  do_sample: false\nmetric_list:\n  - metric: exact_match\n"
)


def write_tasks(folder: Path) -> list[str]:
    """Two tasks of lm_eval as files: one compares likelihoods, one generates."""
    data = folder / "questions.json"
    questions = [{"question": f"the capital of {place} is", "answer": "rome"} for place in ("italy", "a b", "france")]
    data.write_text("\n".join(json.dumps(question) for question in questions))
    for name, kind, more in (("choose", "multiple_choice", CHOICES), ("write", "generate_until", UNTIL)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, kind=kind, data=data, more=more))
    return ["choose", "write"]


@pytest.mark.slow
@few_families
def test_lm_eval(pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    names = write_tasks(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(pair.directory)
    answers = []
    for model in (pair.local, pair.remote):
        program = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=64)
        report = lm_eval.simple_evaluate(
            model=program,
            tasks=names,
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            bootstrap_iters=0,
            log_samples=True,
        )
        answers.append({name: [sample["resps"] for sample in report["samples"][name]] for name in names})
    assert answers[1] == answers[0]
    likelihoods = [float(response[0][0]) for sample in answers[0]["choose"] for response in sample]
    assert len(set(likelihoods)) > 3
    assert any(text for sample in answers[0]["write"] for text in sample[0])
