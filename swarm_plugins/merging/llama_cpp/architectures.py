"""What llama.cpp calls a model, and the numbers that it asks for. What it does not compute is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from swarm_plugins.errors import UnsupportedError

Values = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp runs a type of models."""

    name: str
    """Its own word for it."""
    activation: str = "silu"
    """The only one that it computes."""
    rotates_pairs: bool = False
    """Whether rotary embeddings turn neighbors, not halves: rows of queries and keys are reordered."""
    adds_one: bool = False
    """Whether norms multiply by the weight, where transformers multiplies by one more."""
    has_own_head: bool = True
    """Whether input and output embeddings may differ."""
    has_windows: bool = False
    """Whether it knows layers that see only the last tokens."""


_LLAMA = Architecture("llama", rotates_pairs=True)
_ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe"),
    "gemma": Architecture("gemma", activation="gelu_pytorch_tanh", adds_one=True, has_own_head=False),
    "gemma2": Architecture(
        "gemma2", activation="gelu_pytorch_tanh", adds_one=True, has_own_head=False, has_windows=True
    ),
}
"""By transformers' model type."""
_YARN: Mapping[str, object] = {
    "attention_factor": None, "mscale": None, "mscale_all_dim": None, "beta_fast": 32, "beta_slow": 1, "truncate": True,
}  # fmt: skip
"""The usual settings of yarn; llama.cpp computes others in another way, or not at all."""
_NEEDED_WITH_WINDOWS = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
_WINDOWED_FIRST = ("sliding_attention", "full_attention")


def architecture_of(config: PreTrainedConfig) -> Architecture:
    """Returns the architecture of a config.

    Raises:
        UnsupportedError: If GGUF of its type is not written, or it asks for what llama.cpp does not compute.
    """
    found = _ARCHITECTURES.get(config.model_type)
    if found is None:
        raise UnsupportedError(
            f"models of the type {config.model_type!r} are not written as GGUF; known: {', '.join(_ARCHITECTURES)}: "
            "merge into a folder, and convert it with llama.cpp's convert_hf_to_gguf.py"
        )
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    asked = {
        "hidden_act": (activation, found.activation),
        "norm_topk_prob": (getattr(config, "norm_topk_prob", True), True),
        "mlp_only_layers": (getattr(config, "mlp_only_layers", None) or [], []),
        "decoder_sparse_step": (getattr(config, "decoder_sparse_step", 1), 1),
        "partial_rotary_factor": (_rope(config).get("partial_rotary_factor", 1.0), 1.0),
        "query_pre_attn_scalar": (getattr(config, "query_pre_attn_scalar", _head_dim(config)), _head_dim(config)),
    }
    if found.has_windows:
        # Left out, it would take a default instead.
        missing = [name for name in _NEEDED_WITH_WINDOWS if getattr(config, name, None) is None]
        if missing:
            raise UnsupportedError(
                f"the config has no {' and no '.join(missing)}; llama.cpp's architecture {found.name!r} always uses one"
            )
        types = [_WINDOWED_FIRST[layer % 2] for layer in range(config.num_hidden_layers)]
        asked["layer_types"] = (getattr(config, "layer_types", None) or types, types)
    for setting, (value, known) in asked.items():
        if value != known:
            raise UnsupportedError(
                f"the config sets {setting} to {value!r}, llama.cpp's architecture {found.name!r} computes {known!r}"
            )
    return found


def hyperparameters(config: PreTrainedConfig, architecture: Architecture) -> Values:
    """Returns llama.cpp's metadata of a config, by key after the name of the architecture.

    Raises:
        UnsupportedError: If its rotary embedding is not known.
    """
    heads = config.num_attention_heads
    values: Values = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": _head_dim(config),
        "attention.value_length": _head_dim(config),
        "rope.dimension_count": _head_dim(config),
        **_rope_values(config),
    }
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        values |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
        if (length := getattr(config, "moe_intermediate_size", None)) is not None:
            values["expert_feed_forward_length"] = length
    window = getattr(config, "sliding_window", None)
    if architecture.has_windows:
        values["attention.sliding_window"] = window
    elif window is not None:
        # Within a window's length all layers see all tokens, in llama.cpp as well.
        values["context_length"] = min(window, config.max_position_embeddings)
    for setting in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (value := getattr(config, setting, None)) is not None:
            values[setting] = float(value)
    return values


def frequency_factors(config: PreTrainedConfig) -> Tensor | None:
    """Returns by what llama.cpp divides the frequencies of the rotary embedding, if they are scaled each by itself."""
    rope = _rope(config)
    if rope.get("rope_type") != "llama3":
        return None
    scaled: Tensor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    steps = torch.arange(0, _head_dim(config), 2, dtype=torch.float32) / _head_dim(config)
    return torch.exp(-math.log(rope["rope_theta"]) * steps) / scaled


def in_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Reorders the rows of each head, from halves that are rotated together to neighbors: ``[heads * size, ...]``."""
    halves: Tensor = weight.unflatten(0, (num_heads, 2, -1))
    return halves.transpose(1, 2).reshape(weight.shape)


def heads_of(name: str, config: PreTrainedConfig) -> int | None:
    """Returns the heads whose rows lie in a tensor of GGUF; None if it is not of queries or keys."""
    part = name.split(".")[-2] if name.count(".") > 1 else ""
    heads: int = config.num_attention_heads
    return {"attn_q": heads, "attn_k": getattr(config, "num_key_value_heads", None) or heads}.get(part)


def _head_dim(config: PreTrainedConfig) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def _rope(config: PreTrainedConfig) -> Mapping[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _rope_values(config: PreTrainedConfig) -> Values:
    rope = _rope(config)
    kind = rope.get("rope_type", "default")
    values: Values = {"rope.freq_base": float(rope.get("rope_theta", 10_000.0))}
    if kind == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    elif kind == "yarn" and all(rope.get(key, usual) in (usual, None) for key, usual in _YARN.items()):
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": int(original),
        }
    elif kind not in ("default", "llama3"):
        raise UnsupportedError(
            f"the config scales its rotary embedding by {dict(rope)}, which is not written as GGUF; known: default, "
            f"linear, llama3, and yarn with the usual {', '.join(_YARN)}"
        )
    return values
