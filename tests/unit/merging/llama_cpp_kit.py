"""Tiny models with tokenizers that llama.cpp reads, and llama.cpp itself in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from swarm_plugins.checkpoint.tiny import randomize

TEXT = "The quick brown fox jumps over 13 lazy dogs, isn't it? " * 4 + "Pack my box with 52 dozen jugs of liquor. " * 4
PROMPT = "The lazy fox isn't 52"
_SPECIAL = ["<unk>", "<s>", "</s>"]
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DENSE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MOE = {**_DENSE, "num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32}
_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
# How sentence pieces mark spaces: older files of Llama, newer ones, Gemma.
_SPACES = normalizers.Replace(" ", "▁")
_PREFIXES: dict[str, tuple[Any, Any]] = {
    "pieces": (normalizers.Sequence([normalizers.Prepend("▁"), _SPACES]), None),
    "metaspace": (None, pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)),
    "bare": (_SPACES, pre_tokenizers.Split(" ", "merged_with_previous")),
}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {**_DENSE, "attention_bias": True}, "gpt2"),
    "llama3": ("llama", {**_DENSE, "head_dim": 32, "rope_parameters": _ROPE}, "llama3"),
    "mistral": ("mistral", {**_DENSE, "sliding_window": None}, "metaspace"),
    "mixtral": ("mixtral", _MOE, "pieces"),
    "qwen2": ("qwen2", {**_DENSE, "tie_word_embeddings": True}, "qwen2"),
    "qwen3": ("qwen3", {**_DENSE, "head_dim": 32}, "qwen2"),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "head_dim": 16, "norm_topk_prob": True}, "smollm"),
    "gemma": ("gemma", {**_DENSE, "head_dim": 16, "tie_word_embeddings": True}, "bare"),
    "gemma2": (
        "gemma2",
        {**_DENSE, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True},
        "bare",
    ),
}
"""Type, settings and tokenizer."""


def save_model(name: str, folder: Path) -> Path:
    """Saves one of `MODELS` with its tokenizer."""
    kind, settings, tokenizer = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=torch.float32)
    randomize(model, torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    _tokenizer(tokenizer).save_pretrained(folder)
    return folder


def _tokenizer(kind: str) -> PreTrainedTokenizerFast:
    pieces = kind in _PREFIXES
    tokenizer = Tokenizer(models.BPE(byte_fallback=pieces, unk_token="<unk>" if pieces else None, fuse_unk=pieces))
    special = list(_SPECIAL)
    if pieces:
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer.normalizer, tokenizer.pre_tokenizer = _PREFIXES[kind]
        strip = [] if kind == "bare" else [decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
    else:
        before: dict[str, list[Any]] = {
            "gpt2": [],
            "smollm": [pre_tokenizers.Digits(individual_digits=True)],
            "llama3": [pre_tokenizers.Split(Regex(_LLAMA_3), "isolated")],
            "qwen2": [pre_tokenizers.Split(Regex(_LLAMA_3.replace("{1,3}", "")), "isolated")],
        }
        use_regex = kind in ("gpt2", "smollm")
        steps = [*before[kind], pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if before[kind] else steps[0]
        tokenizer.decoder = decoders.ByteLevel()
    alphabet = [] if pieces else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=312, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    if pieces:
        # Bytes are no special tokens, but what text without a token falls back to.
        found = json.loads(tokenizer.to_str())
        found["added_tokens"] = found["added_tokens"][: len(_SPECIAL)]
        tokenizer = Tokenizer.from_str(json.dumps(found))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


def unspeakable(tokenizer: Any) -> list[int]:
    """Returns tokens without printable text: llama.cpp's server does not tell of those that begin a character."""
    texts = {index: tokenizer.decode([index]) for index in range(len(tokenizer))}
    ends = set(tokenizer.all_special_ids)
    return [index for index, text in texts.items() if index in ends or not (text.isascii() and text.isprintable())]


def run_llama_cpp(
    model: Path, prompts: Sequence[str], *, never: Sequence[int], lora: Path | None = None, num_tokens: int = 12
) -> list[dict[str, Any]]:
    """Returns the greedy answer to each prompt: ``tokens`` without some, and the ``logprobs`` of each.

    Skips the test if the wheel is not installed.
    """
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("the wheel xllamacpp is not installed")
    asked = {"model": str(model), "lora": lora and str(lora), "prompts": prompts, "num_tokens": num_tokens}
    asked["never"] = list(never)
    child = subprocess.run(
        [sys.executable, Path(__file__).with_name("llama_cpp_child.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads(child.stdout.splitlines()[-1])
    return answers
