"""Toys in GGUF files, written by gguf-py under its own names, each beside a twin of the weights that gguf-py widens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

# Widths are multiples of 256, the blocks of some types.
_DENSE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_QWEN_MOE = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}
_GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "attention_bias": True,
    "rope_parameters": {**YARN, "truncate": False},
}
_GEMMA3 = {
    "tie_word_embeddings": True,
    "sliding_window": 8,
    "query_pre_attn_scalar": 64,
    "num_hidden_layers": 6,  # the sixth sees all tokens
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"rope_parameters": LLAMA3}),
    "llama-tied": ("llama", "llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "mixtral": ("llama", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", "qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", "qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", _QWEN_MOE),
    "gemma": ("gemma", "gemma", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", "gemma2", {"tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": 64}),
    "deepseek2": ("deepseek2", "deepseek_v3", _DEEPSEEK),
    "deepseek2-halves": ("deepseek2", "deepseek_v3", _DEEPSEEK),
    "gpt-oss": ("gpt-oss", "gpt_oss", _GPT_OSS),
    "gemma3": ("gemma3", "gemma3_text", _GEMMA3),
}
"""GGUF's architecture, transformers' model type, and settings; in halves: keys and values of kv_b apart."""
# Scales of random blocks, by place, so that weights are about as large as in a model.
_RANDOM = {
    "Q4_K": {0: 1e-4, 2: 1e-3},
    "Q5_K": {0: 5e-5, 2: 1e-3},
    "Q6_K": {208: 3e-5},
}


def _packed(weight: np.ndarray, kind: str, generator: np.random.Generator) -> np.ndarray:
    if kind not in _RANDOM:
        found: np.ndarray = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
        return found
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    shape = (*weight.shape[:-1], weight.shape[-1] // block, size)
    blocks = generator.integers(256, size=shape, dtype=np.uint8)
    for place, scale in _RANDOM[kind].items():
        blocks[..., place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(*weight.shape[:-1], -1)


def _paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """As ``convert_hf_to_gguf.py`` permutes them."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def save_gguf(family: str, kind: str, directory: Path, *, split: bool = False) -> tuple[Path, Path]:
    """Saves a toy as GGUF, and the directory of its widened twin; returns both."""
    architecture, model_type, settings = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**_DENSE, **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.1 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
        if "norm" in name and "gemma" not in family:
            parameter.data += 1
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    names = gguf.get_tensor_name_map(
        next(one for one, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture), config.num_hidden_layers
    )
    generator, file = np.random.default_rng(0), directory / "toy.gguf"
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=9 if split else 0)
    _write_config(writer, config, in_halves=family == "deepseek2-halves")
    wide: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        wide[name] = _write(writer, names, name, tensor, kind, generator, family, config)
    if config.rope_parameters.get("rope_type") == "llama3":
        turned = model.model.rotary_emb.inv_freq
        plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
        writer.add_tensor("rope_freqs.weight", (plain / turned).numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(wide, strict=False)
    model.save_pretrained(directory / "twin")
    return file, directory / "twin"


def _write(
    writer: Any,
    names: Any,
    name: str,
    tensor: Tensor,
    kind: str,
    generator: np.random.Generator,
    family: str,
    config: PreTrainedConfig,
) -> Tensor:
    """Adds a tensor to a file; returns what it is there."""
    if family == "gpt-oss" and ".experts." in name:
        return _write_alternating(writer, names, name, tensor, kind, generator, config)
    if family == "deepseek2-halves" and "kv_b_proj" in name:
        return _write_halves(writer, names, name, tensor, kind, generator, config)
    if name.endswith("experts.gate_up_proj"):
        halves = zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True)
        path = name.removesuffix("gate_up_proj")
        return torch.cat(
            [
                _write(writer, names, f"{path}{leaf}_proj.weight", half, kind, generator, family, config)
                for leaf, half in halves
            ],
            dim=1,
        )
    weight = tensor.numpy().astype(np.float32)
    spelled = name.replace("_correction_bias", "_correction.bias")
    kind = "Q8_0" if kind == "MXFP4" and ".experts." not in name else kind
    gguf_name = names.get_name(spelled, try_suffixes=(".weight", ".bias"))
    if gguf_name is None:  # fused experts have no suffix, and Mixtral's router is called as in a checkpoint
        known = name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if family == "mixtral" else name + ".weight"
        gguf_name = names.get_name(known, try_suffixes=(".weight",))
    gguf_name += "" if gguf_name.endswith((".weight", ".bias")) else ".weight"
    is_raised = "gemma" in family and name.endswith("norm.weight")
    if is_raised:
        weight = weight + 1
    data, found = weight, weight
    if weight.ndim > 1 and "ffn_gate_inp" not in gguf_name and not gguf_name.endswith(".bias"):
        data = _packed(weight, kind, generator)
        found = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
        raw = gguf.GGMLQuantizationType[kind]
    else:
        raw = gguf.GGMLQuantizationType.F32
    if family.startswith("llama") or family == "mixtral":
        for leaf, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if leaf in name:
                data = _paired(data, heads)
    writer.add_tensor(gguf_name, np.ascontiguousarray(data), raw_dtype=raw)
    return torch.from_numpy(np.array(found - 1 if is_raised else found, dtype=np.float32))


def _write_alternating(
    writer: Any,
    names: Any,
    name: str,
    tensor: Tensor,
    kind: str,
    generator: np.random.Generator,
    config: PreTrainedConfig,
) -> Tensor:
    """Adds a tensor of gpt-oss' experts as [out, in], gate and up apart."""
    end, is_bias = ("bias", True) if name.endswith("_bias") else ("weight", False)
    path, leaf = name.removesuffix("_bias").rsplit(".", 1)
    turned = tensor if is_bias else tensor.transpose(1, 2)
    leaves = {"gate_proj": turned[:, ::2], "up_proj": turned[:, 1::2]} if leaf == "gate_up_proj" else {leaf: turned}
    found = [
        _write(writer, names, f"{path}.{one}.{end}", part, kind, generator, "", config) for one, part in leaves.items()
    ]
    wide = found[0] if len(found) == 1 else torch.stack(found, dim=2).flatten(1, 2)
    return wide if is_bias else wide.transpose(1, 2)


def _write_halves(
    writer: Any,
    names: Any,
    name: str,
    tensor: Tensor,
    kind: str,
    generator: np.random.Generator,
    config: PreTrainedConfig,
) -> Tensor:
    """Adds keys, turned round, and values of kv_b, as ``convert_hf_to_gguf.py`` does."""
    sizes = [config.qk_nope_head_dim, config.v_head_dim]
    keys, values = tensor.unflatten(0, (config.num_attention_heads, -1)).split(sizes, dim=1)
    keys, values = (
        _write(writer, names, name.replace("kv_b", leaf), part, kind, generator, "", config)
        for leaf, part in (("k_b", keys.transpose(1, 2)), ("v_b", values))
    )
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def _write_config(writer: Any, config: PreTrainedConfig, *, in_halves: bool) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    _write_heads(writer, config, in_halves=in_halves)
    if config.model_type == "deepseek_v3":
        _write_deepseek(writer, config)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(64)
    _write_rotary(writer, config)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.model_type in ("gemma2", "gemma3_text", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    _write_tokens(writer, config)


def _write_tokens(writer: Any, config: PreTrainedConfig) -> None:
    writer.add_tokenizer_model("gpt2")
    tokens = [f"t{index}" for index in range(config.vocab_size)]
    tokens[3:6] = ["a", "b", "ab"]
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def _write_rotary(writer: Any, config: PreTrainedConfig) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _write_heads(writer: Any, config: PreTrainedConfig, *, in_halves: bool) -> None:
    if in_halves:  # as one key and value of the latent space, which all heads share
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(config.qk_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(getattr(config, "qk_head_dim", 64))
        writer.add_value_length(64)


def _write_deepseek(writer: Any, config: PreTrainedConfig) -> None:
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
