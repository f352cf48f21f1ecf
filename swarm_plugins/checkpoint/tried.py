"""Which model types have been compared with transformers' own, cut in two, by `tests/parity`."""

from __future__ import annotations

import transformers
from transformers import PreTrainedConfig


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TRIED_WITH = "5.23"
"""Release of transformers that the lists below hold for."""
DECODERS = _names("""
    afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba beam biogpt bitnet bloom codegen cohere cohere2
    cohere2_moe cohere_compass_text ctrl cwm dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge
    dots1 dots3_note dots3_note_text emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba
    flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified
    gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo
    gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_text inkling_text internlm3
    iquestcoder jais2 jamba jetmoe kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4 llama4_text
    longcat_flash mamba mamba2 mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral
    ministral3 mistral mixtral mllama modernbert-decoder moss_transcribe_diarize mpt nanochat nemotron nemotron_h olmo
    olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3
    qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma
    rwkv seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xglm xlstm youtu zamba zamba2 zaya
""")
"""Types of decoders, and of checkpoints with towers for images or sound around one."""
ENCODERS = _names("""
    bert bert-generation camembert data2vec-text electra ernie megatron-bert rembert roberta roc_bert
    xlm-roberta xlm-roberta-xl
""")
"""Encoders whose causal language models run as well."""
_WITH_IMAGES = _names("""
    aya_vision cohere2_vision glm4v internvl lighton_ocr llava mistral3 ovis2 paligemma qwen2_5_vl qwen2_vl
""")
"""Further types that are tried with images in their prompts."""
_PLACES = ("transformers.models.", "swarm_plugins.")


def is_tried(config: PreTrainedConfig) -> bool:
    """Returns whether models of a config's type have been compared with the installed transformers' own."""
    release = ".".join(transformers.__version__.split(".")[:2])
    is_known = config.model_type == "prmoe" or config.model_type in DECODERS | ENCODERS | _WITH_IMAGES
    return is_known and release == TRIED_WITH and type(config).__module__.startswith(_PLACES)
