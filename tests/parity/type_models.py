"""A tiny random model of every causal-LM type of the installed transformers.

Each starts from the type's own config class: sizes are shrunk by the names that families share, and each kind of layer
occurs. A type has settings of its own in `OVERRIDES` only where that does not build or would leave a mechanism out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from swarm_plugins.checkpoint.tiny import NUM_LAYERS, SHRUNK, WIDTH, WINDOW, randomize

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# Lists with an entry a layer.
KINDS = ("layer_types", "layers_block_type", "block_types")
_MIXED = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_CONV = ["conv", "full_attention", "conv", "full_attention"]
_INDEXERS = {"indexer_types": ["full", "shared", "shared", "full"]}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
_QWEN4: Mapping[str, Any] = {
    "indexer_kv_heads": 1,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": WIDTH,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 64,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
}
# The last two of six layers read keys and values of the two before them.
_SHARING = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
}
_GEMMA4 = {**_SHARING, "global_head_dim": 16}
_ASSISTANT = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "global_head_dim": 16,
}
_OF_ASSISTANT = {"text_config": {**_ASSISTANT, "num_kv_shared_layers": NUM_LAYERS}, "backbone_hidden_size": WIDTH}
_DOTS3: Mapping[str, Any] = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        **{name: {"hidden_size_global": WIDTH} for name in ("encoder_config", "decoder_config")},
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {**_ROPE, "mrope_section": [2, 1, 1]} for kind in ("sliding_attention", "full_attention")
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "num_key_value_heads": 1,
        "o_groups": 2,
    },
    "dots3_note": {"text_config": _DOTS3},
    "dots3_note_text": _DOTS3,
    "emu3": {"vocabulary_map": {"<image>": 110, "<|extra_200|>": 111, "<|visual token 000000|>": 112}},
    "falcon_h1": {"mamba_d_ssm": None},
    "gemma3n": {"text_config": {**_SHARING, "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4}},
    "gemma3n_text": {**_SHARING, "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_assistant": _OF_ASSISTANT,
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_assistant": _OF_ASSISTANT,
    "gemma4_unified_text": _GEMMA4,
    "glm_moe_dsa": _INDEXERS,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": _MIXED},
    "hy_v4": _INDEXERS,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": _CONV},
    "lfm2_moe": {"layer_types": _CONV},
    "mamba2": {"head_dim": 16},
    # Blocks that look at images, on both sides of a border.
    "mllama": {"text_config": {"cross_attention_layers": [1, 2]}},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "index_block_size": 2,
        "index_topk_blocks": 2,
    },
    "qwen3_5": {"text_config": _MROPE},
    "qwen3_5_moe": {"text_config": _MROPE},
    "qwen3_5_moe_text": _MROPE,
    "qwen3_5_text": _MROPE,
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 16]},
    # Weights are halved in place with every so many layers: a cut model would halve other ones.
    "rwkv": {"rescale_every": 0},
    "xlstm": {"chunk_size": 64, "hidden_size": 128, "embedding_dim": 128},
    "zamba": {
        "attention_hidden_size": None,
        "n_mamba_heads": 2,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
}
_HALF = ["sliding_attention", "full_attention"] * 2
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "falcon/alibi": {"alibi": True},
    "falcon/grouped": {"new_decoder_architecture": True},
    "gemma3n_text/unshared": {"num_kv_shared_layers": 0},
    # As the large Gemma 4: no inputs by layer, nothing shared.
    "gemma4_text/experts": {
        "num_hidden_layers": NUM_LAYERS,
        "layer_types": _HALF,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "attention_k_eq_v": True,
    },
    "gemma4_unified_text/unshared": {"num_hidden_layers": NUM_LAYERS, "layer_types": _HALF, "num_kv_shared_layers": 0},
    # As published: each block chooses its tokens, and hands on the choice.
    "glm_moe_dsa/unshared": {"indexer_types": ["full"] * NUM_LAYERS},
    "gpt_bigcode/heads": {"multi_query": False},
    "gpt_neox/serial": {"use_parallel_residual": False},
    "granitemoehybrid/attention": {"layer_types": ["full_attention"] * NUM_LAYERS, "position_embedding_type": "rope"},
    "lfm2/attention": {"layer_types": ["full_attention"] * NUM_LAYERS},
    "minimax_m3_vl_text/attention": {"layer_types": ["full_attention"] * NUM_LAYERS},
    "mpt/positions": {"attn_config": {"alibi": False}},
    "opt/post_norm": {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "phi/qk_norm": {"qk_layernorm": True},
    # What the last block gets is gathered, too.
    "inkling2_text/threes": {"n_layers_per_attn_res_block": 3},
    "mllama/last": {"text_config": {"cross_attention_layers": [3]}},
    "phi3/longrope": {
        "original_max_position_embeddings": WINDOW,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
        },
    },
    "stablelm/parallel": {"use_parallel_residual": True, "qk_layernorm": True},
}
"""Other settings of a type, by ``type/what``, where they make another mechanism."""
SPANS: Mapping[str, list[tuple[int, int]]] = {
    # Its config does not say how many blocks there are.
    "blt": [(0, 2), (2, 4)],
    # Layers that share keys and values are not cut apart.
    "gemma3n": [(0, 2), (2, 6)],
    "gemma3n_text": [(0, 2), (2, 6)],
    "gemma4": [(0, 2), (2, 6)],
    "gemma4_text": [(0, 2), (2, 6)],
    "gemma4_unified": [(0, 2), (2, 6)],
    "gemma4_unified_text": [(0, 2), (2, 6)],
    # Nor are those that share an indexer's choice.
    "glm_moe_dsa": [(0, 3), (3, 4)],
    "hy_v4": [(0, 3), (3, 4)],
    # A server whose block is not called without images.
    "mllama/last": [(0, 3), (3, 4)],
}
"""Blocks of each server, if not two halves."""
# Transformers finds no weights in these types' multimodal checkpoints when it loads the language model alone.
TEXT_ONLY = ("emu3",)
# Types that transformers 5.23 cannot build here, and why.
UNBUILT = {
    "gemma4_assistant": "validation wants all layers to share keys and values, and then no layer makes them",
    "gemma4_unified_assistant": "as gemma4_assistant",
    "musicgen": "its causal language model takes no MusicgenConfig",
    "musicgen_melody": "as musicgen",
}
# Their towers need packages that tests do without (timm): the weights of their language model alone are saved.
TOWERLESS = {"gemma3n": "gemma3n_text"}
# Settings without which a type's config is not even valid.
_NEEDED: Mapping[str, Mapping[str, Any]] = {
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_ASSISTANT}}
}


def matrix(types: Iterable[str], quick: Container[str] = (), *, every: int = 1) -> list[Any]:
    """Returns a case for each of the types that the installed transformers has.

    Args:
        types: Their names.
        quick: Those that `make test` takes.
        every: Of the others, `make test-all` takes one in so many, and `make test-hours` the rest.
    """
    cases = []
    for place, name in enumerate(sorted(set(types) & set(TYPES))):
        mark = () if name in quick else pytest.mark.hours if place % every else pytest.mark.slow
        cases.append(pytest.param(name, marks=mark))
    return cases


def tiny_type_config(model_type: str) -> PreTrainedConfig:
    """Returns the config of the tiny model of a type or variant."""
    config_class = CONFIG_MAPPING[model_type.split("/")[0]]
    settings = _merged(_shrunk(config_class), OVERRIDES.get(model_type.split("/")[0], {}))
    return config_class(**_merged(settings, VARIANTS.get(model_type, {})))


def tiny_type_model(model_type: str, *, seed: int = 0) -> PreTrainedModel:
    """Returns a type's tiny model, float32, in evaluation mode; the same weights each time.

    It is the causal language model, but of a type that only wraps one the whole multimodal model, as checkpoints are.
    """
    config = tiny_type_config(model_type)
    language = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if language.config_class is not config.sub_configs.get("text_config"):
            model = language._from_config(config, dtype=torch.float32)
        elif model_type in TEXT_ONLY:
            model = language._from_config(config.get_text_config(), dtype=torch.float32)
        else:
            model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    randomize(model, generator)
    for module in model.modules():
        if hasattr(module, "decay_factors"):  # tables that are saved (MiniMax)
            model._init_weights(module)
    for name, table in model.named_buffers():
        if name.endswith(".tid2eid"):  # the experts of each token
            experts = torch.rand(len(table), config.num_local_experts, generator=generator).argsort(dim=1)
            table.copy_(experts[:, : table.shape[1]])
    return model.eval()


def save_type(model_type: str, directory: Path) -> Path:
    """Saves a type's tiny model, or its config and some tensors if it is not built; returns the directory."""
    if model_type in TOWERLESS:
        weights = tiny_type_model(TOWERLESS[model_type]).state_dict()
        tensors = {name.replace("model.", "model.language_model.", 1): one for name, one in weights.items()}
        tensors.pop("lm_head.weight")  # the embeddings
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    elif model_type in UNBUILT:
        tensors = {f"model.layers.{layer}.{index}": torch.zeros(1) for layer in range(NUM_LAYERS) for index in range(4)}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        tiny_type_model(model_type).save_pretrained(directory)
    if model_type in {*UNBUILT, *TOWERLESS, *TEXT_ONLY}:
        tiny_type_config(model_type).save_pretrained(directory)
    return directory


def _shrunk(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Returns small settings for a config class, with those of its parts."""
    default = config_class(**_NEEDED.get(config_class.model_type, {}))
    names = {field.name for field in dataclasses.fields(config_class)}
    settings = {name: value for name, value in SHRUNK.items() if name in names}
    if "kv_lora_rank" in names:
        # Keys and values are made of one latent for all heads.
        settings.update(dict.fromkeys(names & {"num_key_value_heads"}, 4))
    for name in names & set(KINDS):
        if kinds := _kinds(default, name, "sliding_attention", "full_attention"):
            settings[name] = [kinds[layer % len(kinds)] for layer in range(NUM_LAYERS)]
    if kinds := _kinds(default, "mlp_layer_types", "dense", "sparse"):
        settings["mlp_layer_types"] = [kinds[min(layer, len(kinds) - 1)] for layer in range(NUM_LAYERS)]
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            settings[name] = {"model_type": part.model_type, **_shrunk(type(part))}
    return settings


def _kinds(config: PreTrainedConfig, name: str, *usual: str) -> list[str]:
    """Returns the kinds of layers in a list of a config; all of the usual ones where it names only some of them."""
    kinds = list(dict.fromkeys(getattr(config, name, None) or ()))
    has_usual = bool(kinds) and set(kinds) <= set(usual) and getattr(config, "sliding_window", 0) is not None
    return list(usual) if has_usual else kinds


def _merged(settings: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with changes; those of a part are merged into it."""
    merged = dict(settings)
    for name, value in changes.items():
        is_part = isinstance(value, Mapping) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if is_part else value
    return merged
