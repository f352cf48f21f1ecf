"""A small model of any family: a config with the settings of another, few layers and small widths; random weights.

Families share the names of their sizes. What is not a size (kinds of layers and positions, norms, which weights are
tied) stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

WIDTH = 32
NUM_LAYERS = 4
WINDOW = 8
"""Shorter than prompts: what has left the window must be gone."""
VOCAB_SIZE = 128
FIRST_SPECIAL = 100
"""Tokens from here on may have a meaning of their own."""


def _all(value: object, names: str) -> dict[str, object]:
    return dict.fromkeys(names.split(), value)


_SPECIAL = (
    "image_token_id video_token_id audio_token_id vision_start_token_id vision_end_token_id boi_token_id eoi_token_id "
    "boa_token_id eoa_token_id eod_token_id sep_token_id cls_token_id image_token_index boi_token_index "
    "eoi_token_index eoa_token_index"
)
SHRUNK: Mapping[str, object] = {
    "pad_token_id": 0,
    "eos_token_id": 2,
    **_all(1, "bos_token_id decoder_start_token_id"),
    **{name: 110 + index for index, name in enumerate(_SPECIAL.split())},
    **_all(VOCAB_SIZE, "vocab_size unpadded_vocab_size vocab_size_per_layer_input audio_vocab_size"),
    **_all(WIDTH, "hidden_size n_embd d_model dim_model_base word_embed_proj_dim embedding_dim emb_dim"),
    **_all(WIDTH, "attention_hidden_size lru_width expert_ffn_hidden_size"),
    **_all(48, "intermediate_size dff dim_ff ffn_dim d_inner intermediate_size_mlp ffn_hidden_size feed_forward_size"),
    **_all(48, "dense_intermediate_size prefix_dense_intermediate_size"),
    **_all(24, "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size"),
    **_all(24, "moe_shared_expert_intermediate_size shared_intermediate_size router_hidden_size"),
    **_all(NUM_LAYERS, "num_hidden_layers n_layer n_layers num_layers"),
    **_all(4, "num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads"),
    **_all(4, "linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads n_mamba_heads"),
    **_all(2, "num_key_value_heads swa_num_key_value_heads num_kv_heads linear_num_key_heads"),
    **_all(8, "head_dim dim_head d_head swa_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim"),
    **_all(8, "attention_head_size kv_channels rotary_dim query_pre_attn_scalar"),
    **_all(16, "mamba_d_head mamba_head_dim"),
    **_all(256, "max_position_embeddings n_positions n_ctx max_seq_len context_length"),
    **_all(WINDOW, "sliding_window sliding_window_size attention_window_size window_size local_attention"),
    **_all(WINDOW, "attention_chunk_size keep_window_size"),
    **_all(4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    **_all(2, "num_experts_per_tok moe_topk moe_k top_k_experts"),
    **_all(2, "n_group zero_expert_num n_layers_per_attn_res_block"),
    **_all(1, "topk_group first_k_dense_replace num_dense_layers n_shared_experts moe_num_shared_experts"),
    **_all(1, "num_shared_experts"),
    **_all(16, "kv_lora_rank q_lora_rank o_lora_rank hc_lowrank gated_norm_rank adapter_rank"),
    **_all(8, "qk_nope_head_dim qk_rope_head_dim v_head_dim laurel_rank hidden_size_per_layer_input d_rel"),
    # Few heads tie (the ReLU of all is zero), and ties are broken by the number of keys.
    **_all(16, "index_n_heads index_head_dim indexer_n_heads indexer_head_dim"),
    **_all(4, "index_topk"),
    **_all(8, "mamba_d_state ssm_state_size state_size"),
    **_all(2, "mamba_n_groups n_groups mamba_ngroups"),
    **_all(8, "mamba_chunk_size chunk_size"),
    # Towers of multimodal types; they are built, and prompts have no images.
    **_all(32, "image_size"),
    **_all(8, "patch_size"),
    **_all(WIDTH, "adapter_in_dim adapter_out_dim adapter_input_size downsample_hidden_size out_hidden_size"),
    **_all(WIDTH, "vision_output_dim mlp_dim"),
    **_all(WIDTH, "projector_input_dim projector_output_dim ext_pw_out_channel depthwise_separable_out_channel"),
    **_all(WIDTH, "nemo_conv_channels output_channels"),
    **_all(NUM_LAYERS, "num_blocks depth encoder_layers decoder_layers"),
    **_all(4, "encoder_attention_heads decoder_attention_heads"),
    **_all(48, "encoder_ffn_dim decoder_ffn_dim"),
    **_all(0, "num_nextn_predict_layers num_mtp_layers layerdrop"),
    "use_mamba_kernels": False,
    "use_sliding_window": True,
    "rel_extent": 16,
}
"""Small sizes by their names in configs. Tokens from 3 to 99 have no meaning of their own."""

_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")
_OF_REAL: Mapping[str, object] = {
    **SHRUNK,
    # For patterns of up to six layers, and for a border besides layers that share keys and values.
    **_all(6, " ".join(_DEPTHS)),
    **_all(2, "num_kv_shared_layers num_expert_group num_experts_per_token"),
    **_all(16, "global_head_dim qk_head_dim attention_head_dim mamba_headdim"),
    **_all(2 * WIDTH, "attention_hidden_size mamba_d_ssm"),
    **_all(2, "mamba_dt_rank time_step_rank"),
    **_all(4, "num_query_groups"),
}
_EXACT = frozenset({"mamba_d_head", "mamba_head_dim", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads"})
"""Their product is a width."""
_ABSENT: Mapping[str, object] = {"head_dim": 8, "num_key_value_heads": 4}
"""What configs mean by None, in small."""
_NOT_SETTINGS = frozenset({
    "architectures",
    "dtype",
    "model_type",
    "per_layer_config",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
})  # fmt: skip


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a small config of the same class and settings; all kinds of layers that it names occur.

    Whatever its class raises for the small sizes passes through.
    """
    return type(config)(**_shrunk(config))


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    stored = config.to_dict()
    settings = {name: _smaller(name, value) for name, value in stored.items() if name not in _NOT_SETTINGS}
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            settings[name] = {"model_type": part.model_type, **_shrunk(part)}
    _relate_heads(stored, settings)
    depth, number = _first(stored, _DEPTHS), _first(settings, _DEPTHS)
    by_layer = {name: value for name, value in stored.items() if isinstance(value, list) and len(value) == depth > 0}
    picked = _one_of_each_kind(list(zip(*by_layer.values(), strict=True)) or list(range(number)), number)
    settings |= {name: [_smaller(name, value[layer]) for layer in picked] for name, value in by_layer.items()}
    if apart := stored.get("per_layer_config"):
        own = {int(layer): _of_layer(stored, values) for layer, values in apart.items()}
        settings["per_layer_config"] = {layer: own[old] for layer, old in enumerate(picked) if old in own}
    for name, value in stored.items():
        if name not in by_layer and "layer" in name and isinstance(value, list) and _are_indices(value, depth):
            settings[name] = [layer for layer, old in enumerate(picked) if old in value] or [1, 3]
    return settings


def _one_of_each_kind(kinds: Sequence[Any], number: int) -> list[int]:
    """Returns which layers to take, over and over."""
    first = {str(kind): layer for layer, kind in reversed(list(enumerate(kinds)))}
    layers = sorted(first.values())
    return [layers[layer % len(layers)] for layer in range(number)]


def _of_layer(stored: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a layer has apart from the others, in small."""
    small = {name: _smaller(name, value) for name, value in own.items()}
    _relate_heads({**stored, **own}, small)
    return small


def _first(values: Mapping[str, Any], names: Sequence[str]) -> int:
    return next((values[name] for name in names if isinstance(values.get(name), int)), 0)


def _are_indices(value: Sequence[Any], depth: int) -> bool:
    return bool(value) and all(type(one) is int and 0 <= one < depth for one in value) and len(set(value)) == len(value)


def _relate_heads(stored: Mapping[str, Any], settings: dict[str, Any]) -> None:
    """Keeps one head of keys for each of queries, or one for all."""
    heads = _first(stored, _HEADS)
    for name in settings.keys() & set(_KV_HEADS):
        if isinstance(value := stored[name], int) and heads:
            settings[name] = 4 if value == heads else min(value, 2)


def _smaller(name: str, value: Any) -> Any:
    small = _OF_REAL.get(name)
    if value is None:
        return _ABSENT.get(name)
    if name in ("rope_parameters", "rope_scaling"):
        return _rope(value)
    if name.endswith(("_token_id", "_token_index")):
        return min(value, VOCAB_SIZE - 1) if small is None else small
    if isinstance(value, bool) or not isinstance(value, int) or not isinstance(small, int):
        return small if name == "use_mamba_kernels" else value
    return small if name in _EXACT else min(value, small)


def _rope(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    small = {name: _rope(one) for name, one in value.items()}
    frequencies = max(1, int(4 * (value.get("partial_rotary_factor") or 1)))
    if isinstance(value.get("mrope_section"), list):
        number = len(value["mrope_section"])
        small["mrope_section"] = [frequencies // number + (i < frequencies % number) for i in range(number)]
    for name in ("short_factor", "long_factor"):
        if isinstance(value.get(name), list):
            small[name] = value[name][:frequencies]
    return small


@torch.no_grad()
def randomize(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Fills matrices by fan-in and perturbs vectors, so that a lost weight changes outputs."""
    embeddings = model.get_input_embeddings().get_parameter("weight")
    # Saved buffers too (DeepSeek's router bias is one); tables that are computed from the config are not saved.
    saved = model.state_dict(keep_vars=True)
    for name in sorted(saved):
        tensor = saved[name]
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor is embeddings:
            tensor.copy_(noise)
        elif tensor.ndim >= 2:
            tensor.copy_(noise * tensor.shape[-1] ** -0.5)
        else:
            tensor.add_(noise * 0.1)
