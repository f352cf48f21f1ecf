"""LoRA's default target modules for families where PEFT has none, or loses them.

PEFT 0.21 has no defaults for most mixture-of-experts families, and for Mixtral its conversion of old configs turns
"not given" into "no modules" before the default is looked up. Both are mended for configs that name no targets;
drop this when PEFT's own table covers them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as LORA_TARGETS

__all__ = ["add_lora_defaults", "keep_unset_targets"]

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


def add_lora_defaults() -> None:
    """Adds the missing defaults to PEFT's table; what is there stays."""
    for model_type, modules in _DEFAULTS.items():
        LORA_TARGETS.setdefault(model_type, list(modules))


@contextlib.contextmanager
def keep_unset_targets(config: Any) -> Iterator[None]:
    """Keeps "no targets given" as it is through PEFT's conversion of a config, which makes it "no modules"."""
    is_unset = getattr(config, "target_modules", None) is None and not getattr(config, "target_parameters", None)
    yield
    if is_unset and not config.target_modules and not getattr(config, "target_parameters", None):
        config.target_modules = None
