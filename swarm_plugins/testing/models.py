"""Tiny random models for tests: each family's own HF class, reproducible by seed.

Weights are scaled by fan-in, so that activations and logits have a spread of about one: with HF's own initial
values a four-layer model is so close to the identity that a skipped layer would go unnoticed.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from swarm_plugins.checkpoint.tiny import VOCAB_SIZE, randomize
from swarm_plugins.errors import ConfigError

_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")

_DENSE: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MOE: dict[str, object] = {**_DENSE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MIXTRAL: dict[str, object] = {**_DENSE, "num_local_experts": 4, "num_experts_per_tok": 2}

# HF's model type and settings of each family's tiny model.
_SETTINGS: Mapping[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", _DENSE),
    "mixtral": ("mixtral", _MIXTRAL),
    "mixtral_sliding": ("mixtral", {**_MIXTRAL, "sliding_window": 8}),
    "qwen2_moe": ("qwen2_moe", {**_MOE, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "head_dim": 8}),
    "olmoe": ("olmoe", {**_DENSE, "num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_DENSE,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_MIXTRAL,
            "head_dim": 8,
            "sliding_window": 8,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            **_DENSE,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "head_dim": 8,
        },
    ),
    "phimoe": ("phimoe", _MIXTRAL),
    # Experts of each layer, repeated for deeper models.
    "prmoe": ("prmoe", {**_DENSE, "moe_intermediate_size": 24, "experts_per_layer": (0, 4, 3, 6)}),
    "gemma2": ("gemma2", {**_DENSE, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
}

FAMILIES: tuple[str, ...] = tuple(_SETTINGS)
"""Families of the tiny models."""


def tiny_config(family: str, *, num_layers: int = 4) -> PreTrainedConfig:
    """Returns the config of a family's tiny model; ``family`` is one of `FAMILIES`.

    Raises:
        ConfigError: If the family is not known.
    """
    if family not in _SETTINGS:
        raise ConfigError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")
    model_type, settings = _SETTINGS[family]
    settings = {**settings, "num_hidden_layers": num_layers}
    if isinstance(pattern := settings.get("experts_per_layer"), tuple):
        settings["experts_per_layer"] = [pattern[layer % len(pattern)] for layer in range(num_layers)]
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **settings)
    return config


def tiny_model(family: str, *, seed: int = 0, num_layers: int = 4) -> PreTrainedModel:
    """Returns a family's tiny causal language model in float32, in evaluation mode.

    The same arguments give the same weights; torch's global generator is untouched.

    Raises:
        ConfigError: If the family is not known.
    """
    config = tiny_config(family, num_layers=num_layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
        model = build(config, dtype=torch.float32)
    randomize(model, torch.Generator().manual_seed(seed))
    model.train(False)
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token for each printable ASCII character."""
    characters = sorted(set(string.printable) - set("\r\x0b\x0c"))
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *characters])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    wrap: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    return wrap(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def save_tiny(
    family: str, directory: str | Path, *, seed: int = 0, num_layers: int = 4, max_shard_size: str = "5GB"
) -> Path:
    """Saves a family's tiny model and its tokenizer with `save_pretrained`; returns the directory.

    Args:
        family: One of `FAMILIES`.
        directory: Where to save; created if needed.
        seed: Seed of the weights.
        num_layers: Number of decoder layers.
        max_shard_size: Largest file; ``"50KB"`` gives a sharded checkpoint with an index.

    Raises:
        ConfigError: If the family is not known.
    """
    path = Path(directory)
    tiny_model(family, seed=seed, num_layers=num_layers).save_pretrained(path, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(path)
    return path
