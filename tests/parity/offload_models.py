"""Toys of the families whose experts are offloaded in tests: each layout of experts that transformers has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from swarm_plugins.testing.models import _SETTINGS, VOCAB_SIZE

# Experts enough to be offloaded, under each of the names that families have for their number.
_SIX = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 6)


def _wider(family: str) -> dict[str, object]:
    """The settings of a toy that has four experts, for one that has six."""
    _, known = _SETTINGS[family]
    return {**known, **{name: six for name, six in _SIX.items() if name in known}, "num_hidden_layers": 3}


_DENSE = _wider("llama")
_DEEPSEEK = _wider("deepseek_v3")
_JAMBA: dict[str, object] = {
    **_DENSE,
    "num_experts": 6,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_hidden_layers": 4,
    "use_mamba_kernels": False,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
}
_NEMOTRON: dict[str, object] = {
    **_DENSE,
    "hybrid_override_pattern": "*EE",
    "layers_block_type": ["attention", "moe", "moe"],
    "head_dim": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}

# HF's model type and settings.
SETTINGS: dict[str, tuple[str, dict[str, object]]] = {
    "mixtral": ("mixtral", _wider("mixtral")),
    "qwen2_moe": ("qwen2_moe", _wider("qwen2_moe")),
    "qwen3_moe": ("qwen3_moe", _wider("qwen3_moe")),
    "olmoe": ("olmoe", _wider("olmoe")),
    "deepseek_v2": ("deepseek_v2", _DEEPSEEK),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    # Transposed, with biases, gate and up interleaved.
    "gpt_oss": ("gpt_oss", _wider("gpt_oss")),
    "glm4_moe": ("glm4_moe", _wider("glm4_moe")),
    "granitemoe": ("granitemoe", _wider("mixtral")),
    "phimoe": ("phimoe", _wider("phimoe")),
    "jamba": ("jamba", _JAMBA),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {**_DENSE, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1},
    ),
    # Transposed, no biases.
    "aria_text": ("aria_text", {**_DENSE, "moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 1}),
    # Without a gate.
    "nemotron_h": ("nemotron_h", _NEMOTRON),
    # Pools of different size, top-1, a residual branch; a dense layer.
    "prmoe": ("prmoe", {**_DENSE, "experts_per_layer": [4, 0, 8], "moe_intermediate_size": 24}),
    # The paper's GPT: no gate, biases everywhere, learned positions.
    "prmoe_gpt": (
        "prmoe",
        {
            **_DENSE,
            "experts_per_layer": [4, 0, 8],
            "residual": "learned",
            "mlp_gated": False,
            "hidden_act": "gelu",
            "mlp_bias": True,
            "attention_bias": True,
            "norm": "layer",
            "position_embedding": "learned",
        },
    ),
}


def toy_config(family: str, **other: object) -> PreTrainedConfig:
    """Returns the config of a family's toy, with other settings if given."""
    model_type, settings = SETTINGS[family]
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **{**settings, **other})
    return config


def toy(family: str, *, seed: int = 0, **other: object) -> PreTrainedModel:
    """Returns a family's toy with weights scaled by fan-in, so that nothing is lost without notice."""
    build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(toy_config(family, **other), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                spread = parameter.shape[-1] ** -0.5 if parameter.ndim >= 2 else 0.1
                noise = torch.randn(parameter.shape) * spread
                parameter.copy_(noise if parameter.ndim >= 2 else parameter + noise)
    model.train(False)
    return model


def save_toy(
    family: str, directory: Path, *, is_fused: bool = False, max_shard_size: str = "5GB", **other: object
) -> PreTrainedModel:
    """Writes a family's toy, per expert as the family's checkpoints are, or with fused tensors; returns it."""
    model = toy(family, **other)
    model.save_pretrained(directory, save_original_format=not is_fused, max_shard_size=max_shard_size)
    return model


class Toys(Protocol):
    """Finds the directory of a family's toy."""

    def __call__(self, family: str, *, is_fused: bool = False) -> Path: ...


def tokens(rows: int = 2, length: int = 9, seed: int = 0) -> torch.Tensor:
    """Returns token ids, ``[rows, length]``."""
    return torch.randint(3, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(seed))
