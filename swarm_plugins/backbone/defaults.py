"""LoRA's default target modules for families where PEFT has none, or loses them.

PEFT 0.21 has no defaults for most mixture-of-experts families, and for Mixtral its conversion of old configs turns
"not given" into "no modules" before the default is looked up. Both are mended for configs that name no targets;
drop this when PEFT's own table covers them.
"""

from __future__ import annotations

import functools
from typing import Any

import peft.utils.transformers_weight_conversion as weight_conversion
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as LORA_TARGETS

__all__ = ["install_lora_defaults"]

_QUERY_VALUE = ("q_proj", "v_proj")
_DEFAULTS: dict[str, tuple[str, ...]] = {
    "qwen2_moe": _QUERY_VALUE,
    "qwen3": _QUERY_VALUE,
    "qwen3_moe": _QUERY_VALUE,
    "olmoe": _QUERY_VALUE,
    "gpt_oss": _QUERY_VALUE,
    "phimoe": _QUERY_VALUE,
    "granitemoe": _QUERY_VALUE,
    "glm4_moe": _QUERY_VALUE,
    "ernie4_5_moe": _QUERY_VALUE,
    # Multi-head latent attention has no v_proj: the compressed projections take its place.
    "deepseek_v2": ("q_proj", "q_b_proj", "kv_b_proj"),
    "deepseek_v3": ("q_proj", "q_b_proj", "kv_b_proj"),
}


@functools.cache
def install_lora_defaults() -> None:
    """Adds the missing defaults to PEFT's table. A second call does nothing."""
    for model_type, modules in _DEFAULTS.items():
        LORA_TARGETS.setdefault(model_type, list(modules))
    _mend_conversion()


def _mend_conversion() -> None:
    original = weight_conversion.convert_peft_config_for_transformers

    @functools.wraps(original)
    def convert(peft_config: Any, model: Any, conversions: Any) -> None:
        names_nothing = getattr(peft_config, "target_modules", None) is None and not getattr(
            peft_config, "target_parameters", None
        )
        original(peft_config, model=model, conversions=conversions)
        if names_nothing and peft_config.target_modules == set() and not peft_config.target_parameters:
            peft_config.target_modules = None

    weight_conversion.convert_peft_config_for_transformers = convert
