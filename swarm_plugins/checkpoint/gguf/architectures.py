"""What the tensors of GGUF's architectures are called in transformers, and what llama.cpp's converter did to them.

The names are those of ``convert_hf_to_gguf.py`` (https://github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_FFN_NORM = {"ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PARAMETERS = ("_bias", ".sinks")
"""Ends of names that are not modules'."""
_IN_BLOCK = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")


class Place(NamedTuple):
    """Where a tensor goes."""

    name: str
    """In transformers; ``{}`` stands for the index of an expert."""
    block: int | None
    """None: it is outside of the blocks."""
    is_part: bool = False
    """Whether it is a part of a weight, to be put together from blocks of ggml's."""


@dataclass(frozen=True)
class Architecture:
    """One architecture."""

    model_type: str
    """What transformers calls it."""
    leaves: Mapping[str, str]
    """Modules of a block, by GGUF's name."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Modules of an expert, by GGUF's name for those of all experts, which are one tensor."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """What weights are made of that transformers has in another form, by GGUF's name with ``weight`` or ``bias``."""
    is_paired: bool = False
    """Whether rows of queries and keys are ordered so that rotary embeddings turn neighbours."""
    has_raised_norms: bool = False
    """Whether weights of norms were increased by one."""

    @property
    def has_experts(self) -> bool:
        """Whether its blocks have experts."""
        return bool(self.experts) or any("exps" in name for name in self.parts)

    def place(self, name: str) -> Place | None:
        """Returns where a tensor goes; None if it is not known."""
        if match := _IN_BLOCK.fullmatch(name):
            block, leaf, kind = int(match[1]), match[2], match[3]
            if part := self.parts.get(f"{leaf}.{kind}"):
                return Place(f"model.layers.{block}.{part}", block, is_part=True)
            inside = self.leaves.get(leaf)
            if inside is None and leaf in self.experts:
                inside = self.experts[leaf]
            if inside is None:
                return None
            is_whole = inside.endswith(_PARAMETERS)
            return Place(f"model.layers.{block}.{inside if is_whole else f'{inside}.{kind}'}", block)
        module, _, kind = name.rpartition(".")
        return Place(f"{_OUTSIDE[module]}.{kind}", None) if module in _OUTSIDE and kind == "weight" else None


_MIXTRAL = Architecture(
    "mixtral",
    {**_ATTENTION, **_FFN_NORM, "ffn_gate_inp": "block_sparse_moe.gate"},
    {
        f"ffn_{leaf}_exps": f"block_sparse_moe.experts.{{}}.{to}"
        for leaf, to in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    is_paired=True,
)
_MLA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
}
_EXPERTS = {f"ffn_{leaf}_exps": f"mlp.experts.{{}}.{leaf}_proj" for leaf in ("gate", "up", "down")}
_DEEPSEEK = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{leaf}_shexp": f"mlp.shared_experts.{leaf}_proj" for leaf in ("gate", "up", "down")},
}
_LATENT_PARTS = {"attn_k_b.weight": "self_attn.kv_b_proj.codes_0", "attn_v_b.weight": "self_attn.kv_b_proj.codes_1"}
_GPT_OSS = {
    **_ATTENTION,
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_down_exps": "mlp.experts.down_proj_bias",
}
# Gate and up alternate in transformers.
_GPT_OSS_PARTS = {
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj_codes_0",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj_codes_1",
    "ffn_down_exps.weight": "mlp.experts.down_proj_codes",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias_codes_0",
    "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias_codes_1",
}
_ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", {**_ATTENTION, **_FFN_NORM, **_MLP}, is_paired=True),
    "qwen2": Architecture("qwen2", {**_ATTENTION, **_FFN_NORM, **_MLP}),
    "qwen3": Architecture("qwen3", {**_ATTENTION, **_HEAD_NORMS, **_FFN_NORM, **_MLP}),
    "qwen3moe": Architecture(
        "qwen3_moe",
        {**_ATTENTION, **_HEAD_NORMS, **_FFN_NORM, "ffn_gate_inp": "mlp.gate"},
        _EXPERTS,
    ),
    "deepseek2": Architecture("deepseek_v3", {**_MLA, **_FFN_NORM, **_MLP, **_DEEPSEEK}, _EXPERTS, _LATENT_PARTS),
    "gpt-oss": Architecture("gpt_oss", _GPT_OSS, parts=_GPT_OSS_PARTS),
    "gemma": Architecture("gemma", {**_ATTENTION, **_FFN_NORM, **_MLP}, has_raised_norms=True),
    "gemma2": Architecture("gemma2", {**_ATTENTION, **_FOUR_NORMS, **_MLP}, has_raised_norms=True),
    "gemma3": Architecture("gemma3_text", {**_ATTENTION, **_HEAD_NORMS, **_FOUR_NORMS, **_MLP}, has_raised_norms=True),
}
KNOWN = (*_ARCHITECTURES, "llama with experts (Mixtral)")
"""For messages."""


def architecture_of(name: object, num_experts: int) -> Architecture | None:
    """Returns what is known of an architecture, given its name in GGUF."""
    if name == "llama" and num_experts > 0:
        return _MIXTRAL
    return _ARCHITECTURES.get(name) if isinstance(name, str) else None
