"""The models of DeepSpeed-MoE (Rajbhandari et al. 2022) by the names the paper gives them.

Tables 1 and 4, the ablation of section 4.1.4, the students of Table 5 and the models of Table 6. All are GPTs with a
vocabulary of 50,257, 2,048 learned positions, tied embeddings and MLPs of four times the width; every second layer of a
mixture has experts. The paper gives their parameters in billions, rounded, as counted here.
"""

from __future__ import annotations

from typing import Any

from swarm_plugins.errors import ConfigError

_GPT: dict[str, Any] = {
    "vocab_size": 50257,
    "max_position_embeddings": 2048,
    "position_embedding": "learned",
    "norm": "layer",
    "rms_norm_eps": 1e-5,
    "mlp_gated": False,
    "hidden_act": "gelu",
    "mlp_bias": True,
    "attention_bias": True,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
# Layers, width, heads: GPT-3's, with 16 heads for 1.3B as in the paper's scripts; of Table 6 they are not told, and
# have 128 features here. Table 6 prints the depths of 8B and 24B exchanged: its parameters are those of these.
_BASES = {
    "350M": (24, 1024, 16),
    "1.3B": (24, 2048, 16),
    "6.7B": (32, 4096, 32),
    "2.4B": (16, 3584, 28),
    "8B": (40, 4096, 32),
    "24B": (30, 8192, 64),
    "47B": (58, 8192, 64),
}
_STUDENT, _STUDENT_LAYERS = "+L21", 21
# Experts of the layers that have any, from the first to the last.
_POOLS = {
    "350M": None,
    "1.3B": None,
    "6.7B": None,
    "350M+MoE-128": [128] * 12,
    "1.3B+MoE-128": [128] * 12,
    "350M+PR-MoE-32/64": [32] * 10 + [64] * 2,
    "1.3B+PR-MoE-64/128": [64] * 10 + [128] * 2,
    "350M+MoE-32": [32] * 12,
    "350M+Pyramid-MoE-32/64": [32] * 10 + [64] * 2,
    "350M+Residual-MoE-32": [32] * 12,
    "350M+PR-MoE-32/64+L21": [32] * 8 + [64] * 2,
    "1.3B+PR-MoE-64/128+L21": [64] * 8 + [128] * 2,
    "2.4B+MoE-128": [128] * 8,
    "8B+MoE-128": [128] * 20,
    "24B+MoE-128": [128] * 15,
    "47B+MoE-128": [128] * 29,
}


def preset_settings(name: str) -> dict[str, Any]:
    """Returns the settings of `PRMoEConfig` for a model of the paper.

    Raises:
        ConfigError: If there is no such model.
    """
    if name not in _POOLS:
        raise ConfigError(f"unknown preset {name!r}; known: {', '.join(_POOLS)}")
    num_layers, width, heads = _BASES[name.partition("+")[0]]
    num_layers = _STUDENT_LAYERS if name.endswith(_STUDENT) else num_layers
    pools = _POOLS[name]
    return {
        **_GPT,
        "num_hidden_layers": num_layers,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": heads,
        "experts_per_layer": [0] * num_layers if pools is None else pools,
        "moe_layers": None if pools is None else list(range(1, num_layers, 2)),
        "residual": "sum" if "PR-MoE" in name or "Residual" in name else None,
    }
