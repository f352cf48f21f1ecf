"""Makes the config of transformers from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from swarm_plugins.checkpoint.gguf.architectures import Architecture
from swarm_plugins.checkpoint.gguf.header import GgufTensor, Value
from swarm_plugins.errors import CheckpointError, UnsupportedError

_NEEDED = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
_COUNTS = {
    "feed_forward_length": "intermediate_size",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_NUMBERS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
_MAX_COUNT = 1 << 31
# Llama 3.1 to 3.3; the file has only what they come to.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_NUM_EXPERTS = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts", "deepseek_v3": "n_routed_experts"}
# Of llama.cpp's ways to weigh experts.
_SIGMOID = 2
# Blocks of the models of 27B parameters, whose attention is scaled otherwise.
_DEEP_GEMMA = {"gemma2": 46, "gemma3_text": 62}


def config_fields(
    kind: Architecture,
    metadata: Mapping[str, Value],
    tensors: Mapping[str, GgufTensor],
    frequencies: torch.Tensor | None,
    label: str,
) -> dict[str, Any]:
    """Returns the settings of a model.

    Args:
        kind: Its architecture.
        metadata: Of the file.
        tensors: By their names in GGUF.
        frequencies: The divisors of rotary frequencies that the file may have.
        label: Names the file in messages.

    Raises:
        CheckpointError: If a number is missing, or cannot be right.
        UnsupportedError: If the positions are scaled in a way that is not known.
    """
    stated = _Stated(metadata, label)
    fields: dict[str, Any] = {to: stated.count(key, is_needed=True) for key, to in _NEEDED.items()}
    fields.update({to: found for key, to in _COUNTS.items() if (found := stated.count(key))})
    fields.update({to: number for key, to in _NUMBERS.items() if (number := stated.number(key)) is not None})
    # Each block has many; a config makes a list of them.
    if fields["num_hidden_layers"] > len(tensors):
        raise CheckpointError(
            f"{label} says block_count {fields['num_hidden_layers']} and has {len(tensors)} tensors: fetch it again"
        )
    is_latent = kind.model_type == "deepseek_v3"
    first = "blk.0.attn_output.weight" if is_latent else "blk.0.attn_q.weight"
    queries, table = tensors.get(first), tensors.get("token_embd.weight")
    if queries is None or table is None:
        raise CheckpointError(f"{label} has no token_embd.weight or {first}: the model is incomplete")
    if is_latent:
        fields.update(_latent(stated, fields["num_attention_heads"]))
    fields.setdefault("head_dim", queries.shape[0] // fields["num_attention_heads"])
    fields["vocab_size"] = table.shape[0]
    fields["tie_word_embeddings"] = "output.weight" not in tensors
    if kind.model_type in ("llama", "qwen3", "qwen3_moe", "gpt_oss"):
        fields["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if kind.model_type == "llama":
        fields["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if kind.has_experts:
        experts = stated.count("expert_count", is_needed=True)
        fields[_NUM_EXPERTS.get(kind.model_type, "num_experts")] = experts
        # As llama.cpp computes these architectures.
        fields.setdefault("norm_topk_prob", True)
    fields["rope_parameters"] = _rotary(stated, fields["head_dim"], frequencies)
    fields.update(_of_family(kind.model_type, stated, fields))
    for key, to in _IDS.items():
        token = metadata.get(f"tokenizer.ggml.{key}")
        fields[to] = token if isinstance(token, int) and 0 <= token < fields["vocab_size"] else None
    _check_widths(fields, tensors, label)
    return fields


def _of_family(model_type: str, stated: _Stated, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings that follow from others in a family."""
    if model_type == "gpt_oss":
        # As published; GGUF does not say that the range of yarn's ramp is not rounded.
        exact = {"truncate": False} if fields["rope_parameters"]["rope_type"] == "yarn" else {}
        inner = stated.count("expert_feed_forward_length") or fields.get("intermediate_size")
        return {"rope_parameters": fields["rope_parameters"] | exact, "intermediate_size": inner}
    return _gemma(model_type, stated, fields) if model_type in _DEEP_GEMMA else {}


def _gemma(model_type: str, stated: _Stated, fields: Mapping[str, Any]) -> dict[str, Any]:
    is_deep = fields["num_hidden_layers"] == _DEEP_GEMMA[model_type]
    scalar = fields["hidden_size"] // fields["num_attention_heads"] if is_deep else fields["head_dim"]
    rotary = fields["rope_parameters"]
    if model_type == "gemma3_text":
        near = {"rope_type": "default", "rope_theta": stated.number("rope.freq_base_swa") or 10000.0}
        rotary = {"full_attention": rotary, "sliding_attention": near}
    return {"query_pre_attn_scalar": scalar, "rope_parameters": rotary}


def _latent(stated: _Stated, num_heads: int) -> dict[str, Any]:
    """Returns the settings of multi-head latent attention and of DeepSeek-V3's router (arXiv 2412.19437, 2.1)."""
    if (gating := stated.count("expert_gating_func")) != _SIGMOID:
        raise UnsupportedError(
            f"{stated.label} routes by expert_gating_func {gating}; known: {_SIGMOID} (sigmoid, DeepSeek-V3)"
        )
    # Files for attention in the latent space have the lengths of heads apart.
    keys, values = (
        stated.count(f"attention.{one}_length_mla") or stated.count(f"attention.{one}_length", is_needed=True) or 0
        for one in ("key", "value")
    )
    turned = stated.count("rope.dimension_count", is_needed=True) or 0
    experts, chosen = stated.count("expert_count", is_needed=True) or 0, stated.count("expert_used_count") or 0
    groups, taken = stated.count("expert_group_count") or 1, stated.count("expert_group_used_count") or 1
    scale = stated.number("expert_weights_scale")
    # A group is rated by its two best experts.
    is_right = experts % groups == 0 and experts // groups >= 2 and taken <= groups
    if not is_right or turned >= keys or not 1 <= chosen <= experts // groups * taken:
        raise CheckpointError(
            f"{stated.label} says {chosen} of {experts} experts, {taken} of {groups} groups, and {turned} of {keys} "
            "dimensions that positions turn, which do not fit together: fetch it again"
        )
    return {
        "num_key_value_heads": num_heads,
        "q_lora_rank": stated.count("attention.q_lora_rank") or None,
        "kv_lora_rank": stated.count("attention.kv_lora_rank", is_needed=True),
        "qk_nope_head_dim": keys - turned,
        "qk_rope_head_dim": turned,
        "head_dim": turned,
        "v_head_dim": values,
        "first_k_dense_replace": stated.count("leading_dense_block_count") or 0,
        "n_shared_experts": stated.count("expert_shared_count", is_needed=True),
        "n_group": groups,
        "topk_group": taken,
        "norm_topk_prob": bool(stated.number("expert_weights_norm")),
        "routed_scaling_factor": 1.0 if scale is None else scale,
    }


def _latent_widths(fields: Mapping[str, Any], *, in_halves: bool) -> dict[str, list[int]]:
    heads, hidden, rank = fields["num_attention_heads"], fields["hidden_size"], fields["kv_lora_rank"]
    inner, first, nope = (
        fields.get("moe_intermediate_size") or 0,
        fields["first_k_dense_replace"],
        fields["qk_nope_head_dim"],
    )
    turned, queries = fields["qk_rope_head_dim"], fields["q_lora_rank"]
    rows = heads * (nope + turned)
    values = fields["v_head_dim"]
    # Of each block: heads that differ could be read as other heads with as many rows in all.
    halves = {
        f"blk.{block}.attn_{half}_b.weight": shape
        for block in range(fields["num_hidden_layers"])
        for half, shape in (("k", [heads, rank, nope]), ("v", [heads, values, rank]))
    }
    wanted = {
        "blk.0.attn_kv_a_mqa.weight": [rank + turned, hidden],
        **(halves if in_halves else {"blk.0.attn_kv_b.weight": [heads * (nope + values), rank]}),
        f"blk.{first}.ffn_up_exps.weight": [fields["n_routed_experts"], inner, hidden],
        f"blk.{first}.ffn_up_shexp.weight": [fields["n_shared_experts"] * inner, hidden],
        f"blk.0.attn_q{'_b' if queries else ''}.weight": [rows, queries or hidden],
    }
    return wanted | ({"blk.0.ffn_up.weight": [fields.get("intermediate_size", 0), hidden]} if first else {})


def _check_widths(fields: Mapping[str, Any], tensors: Mapping[str, GgufTensor], label: str) -> None:
    """Compares widths with tensors: a model is made in the widths that are stated."""
    table = {"token_embd.weight": [fields["vocab_size"], fields["hidden_size"]]}
    if "kv_lora_rank" in fields:
        wanted = table | _latent_widths(fields, in_halves="blk.0.attn_k_b.weight" in tensors)
    else:
        wanted = table | _plain_widths(fields)
    for name, shape in wanted.items():
        found = list(tensors[name].shape) if name in tensors else None
        if found != shape:
            raise CheckpointError(
                f"{name} in {label} is {found}, its metadata ask for {shape}: the header is corrupt, fetch it again"
            )


def _plain_widths(fields: Mapping[str, Any]) -> dict[str, list[int]]:
    rows = fields["num_attention_heads"] * fields["head_dim"]
    experts = fields.get("num_local_experts") or fields.get("num_experts")
    inner = fields.get("moe_intermediate_size", fields.get("intermediate_size"))
    up = [inner, fields["hidden_size"]]
    return {
        "blk.0.attn_q.weight": [rows, fields["hidden_size"]],
        **({"blk.0.ffn_up.weight": up} if experts is None else {"blk.0.ffn_up_exps.weight": [experts, *up]}),
    }


class _Stated:
    """The metadata of an architecture."""

    def __init__(self, metadata: Mapping[str, Value], label: str) -> None:
        self.label = label
        self._metadata = metadata
        self._prefix = metadata["general.architecture"]

    def get(self, key: str) -> Value | None:
        return self._metadata.get(f"{self._prefix}.{key}")

    def count(self, key: str, *, is_needed: bool = False) -> int | None:
        found = self.get(key)
        if found is None and not is_needed:
            return None
        if type(found) is not int or not int(is_needed) <= found < _MAX_COUNT:
            raise CheckpointError(
                f"{self.label} says {self._prefix}.{key} {repr(found)[:100]}, expected a number from 1 to "
                f"{_MAX_COUNT}: it is corrupt or of a kind that is not known"
            )
        return found

    def number(self, key: str) -> float | None:
        found = self.get(key)
        if found is None:
            return None
        if isinstance(found, str) or not math.isfinite(found):
            raise CheckpointError(
                f"{self.label} says {self._prefix}.{key} {repr(found)[:100]}, expected a number: fetch it again"
            )
        return float(found)


def _rotary(stated: _Stated, head_dim: int, frequencies: torch.Tensor | None) -> dict[str, Any]:
    base = stated.number("rope.freq_base") or 10000.0
    scaling, factor = stated.get("rope.scaling.type"), stated.number("rope.scaling.factor")
    width = stated.count("rope.dimension_count")
    if width is not None and width != head_dim:
        raise UnsupportedError(f"{stated.label} turns {width} of {head_dim} dimensions of a head; known: all of them")
    if frequencies is not None:
        found = _llama3(base, head_dim, frequencies.double())
        if found is not None:
            return found
    elif scaling == "linear" and factor:
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}
    elif scaling == "yarn" and factor and factor >= 1:
        return _yarn(stated, base, factor)
    elif scaling in (None, "none"):
        return {"rope_type": "default", "rope_theta": base}
    how = "rope_freqs.weight" if frequencies is not None else repr(scaling)[:100]
    raise UnsupportedError(
        f"{stated.label} scales positions by {how}; known are none, linear, yarn with a factor, and that of Llama 3"
    )


def _yarn(stated: _Stated, base: float, factor: float) -> dict[str, Any]:
    fast, slow = (stated.number(f"rope.scaling.yarn_beta_{one}") for one in ("fast", "slow"))
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": base,
        "factor": factor,
        "original_max_position_embeddings": stated.count("rope.scaling.original_context_length", is_needed=True),
        "beta_fast": fast or 32.0,
        "beta_slow": slow or 1.0,
    }
    if base <= 1 or not 0 < found["beta_slow"] <= found["beta_fast"]:
        raise CheckpointError(
            f"{stated.label} scales positions by yarn with the base {base}, beta_fast {found['beta_fast']} and "
            f"beta_slow {found['beta_slow']}, expected a base over 1 and 0 < beta_slow <= beta_fast: fetch it again"
        )
    if log := stated.number("rope.scaling.yarn_log_multiplier"):
        found["mscale"] = found["mscale_all_dim"] = 10 * log
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if stated.number(f"rope.scaling.{key}") not in (None, 1.0):
            raise UnsupportedError(f"{stated.label} scales positions by yarn with {key} other than 1: give safetensors")
    return found


def _llama3(base: float, head_dim: int, divisors: torch.Tensor) -> dict[str, Any] | None:
    """Returns the scaling of Llama 3 that divides the frequencies in this way; None if there is none."""
    # Before anything of this size is made: head_dim is not compared with a tensor yet.
    if divisors.shape != (math.ceil(head_dim / 2),) or not divisors.numel():
        return None
    factor = float(divisors.max())
    if not math.isfinite(factor) or factor < 1:
        return None
    dimensions = torch.arange(0, head_dim, 2, dtype=torch.double, device="cpu")
    turns = base ** -(dimensions / head_dim) / (2 * math.pi)  # a token
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = ((_LLAMA3["original_max_position_embeddings"] * turns - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(divisors, expected, rtol=1e-3):
        return None
    return {"rope_type": "llama3", "rope_theta": base, "factor": factor, **_LLAMA3}
