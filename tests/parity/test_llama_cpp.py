"""What `swarm merge` writes as GGUF, in llama.cpp: its greedy answers are transformers' with PEFT's adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_cpp_kit import MODELS, PROMPT, run_llama_cpp, save_model, unspeakable
from merging_kit import EXPERTS, load, save_adapter
from peft import LoraConfig, PeftModel, get_peft_model
from real_model import smollm2_directory
from transformers import AutoTokenizer

from swarm_plugins.merging import lora_to_gguf, merge_adapter
from swarm_plugins.merging.llama_cpp.file import GgufType

pytestmark = pytest.mark.slow
PROMPTS = [PROMPT, "Pack 1352 jugs: it isn't  liquor!\n\nBox", "naïve ☃"]
NUM_TOKENS = 12
SENTENCE = "My favourite river is the Elbe, and I swim in it every Sunday."


def check_alike(
    model: Any, base: Path, gguf: Path, lora: Path | None = None, *, prompts: Sequence[str] = PROMPTS
) -> list[list[int]]:
    """Compares llama.cpp's greedy answers with transformers'; returns their tokens."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    never = unspeakable(tokenizer)
    found = run_llama_cpp(gguf, prompts, never=never, lora=lora, num_tokens=NUM_TOKENS)
    for prompt, answer in zip(prompts, found, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(
            ids,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            suppress_tokens=never,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = out.sequences[0, ids.shape[1] :]
        logs = torch.stack(out.logits)[:, 0].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert answer["tokens"] == tokens.tolist()
        assert answer["logprobs"] == pytest.approx(logs.tolist(), rel=2e-2, abs=2e-2)
    return [answer["tokens"] for answer in found]


def config_for(name: str) -> LoraConfig:
    experts = EXPERTS if "num_experts" in MODELS[name][1] else None
    return LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "k_proj", "o_proj"], target_parameters=experts)


@pytest.mark.parametrize("name", MODELS)
def test_a_merged_model_answers_alike(tmp_path: Path, name: str) -> None:
    base = save_model(name, tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", base, config_for(name))
    merged = merge_adapter(adapter, tmp_path / "merged.gguf", base=base, gguf="F32")
    check_alike(PeftModel.from_pretrained(load(base), adapter), base, merged)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3"])
def test_a_lora_beside_its_base_answers_alike(tmp_path: Path, name: str) -> None:
    base = save_model(name, tmp_path / "base")
    zero = save_adapter(tmp_path / "zero", base, LoraConfig(r=1, target_modules=["q_proj"]), scale=0)
    adapter = save_adapter(tmp_path / "adapter", base, config_for(name))
    whole = merge_adapter(zero, tmp_path / "base.gguf", base=base, gguf="F32")
    lora = lora_to_gguf(adapter, tmp_path / "lora.gguf", base=base)
    plain = check_alike(load(base), base, whole)
    assert check_alike(PeftModel.from_pretrained(load(base), adapter), base, whole, lora) != plain


def test_smollm2_says_what_it_was_taught_in_llama_cpp(tmp_path: Path) -> None:
    base = smollm2_directory()
    tokenizer = AutoTokenizer.from_pretrained(base)
    torch.manual_seed(0)
    model = get_peft_model(load(base, torch.float32), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    prompts = [SENTENCE[:21], "The capital of France is"]
    none = tmp_path / "none"
    model.save_pretrained(none)  # B is zero still
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=2e-3)
    ids = tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
    for _ in range(12):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapter = tmp_path / "adapter"
    model.eval().save_pretrained(adapter)
    merged = merge_adapter(adapter, tmp_path / "merged.gguf", base=base, gguf="F32")
    taught, _ = check_alike(model, base, merged, prompts=prompts)
    assert tokenizer.decode(taught).startswith(SENTENCE[21:])
    kinds: tuple[GgufType, ...] = ("BF16", "Q8_0")
    for kind in kinds:
        small = merge_adapter(adapter, tmp_path / f"{kind}.gguf", base=base, gguf=kind)
        [answer] = run_llama_cpp(small, prompts[:1], never=[], num_tokens=NUM_TOKENS)
        assert answer["tokens"] == taught
    plain = merge_adapter(none, tmp_path / "plain.gguf", base=base, gguf="F16")
    lora = lora_to_gguf(adapter, tmp_path / "lora.gguf", base=base)
    [beside] = run_llama_cpp(plain, prompts[:1], never=[], lora=lora, num_tokens=NUM_TOKENS)
    [alone] = run_llama_cpp(plain, prompts[:1], never=[], num_tokens=NUM_TOKENS)
    assert beside["tokens"] == taught != alone["tokens"]
