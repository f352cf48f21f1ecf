"""Hooks into PEFT's injection: refuses what cannot work on remote blocks, and fills in missing targets.

PEFT has no hook before an injection; the conversion of old configs is the first function it calls with config and
model, for every kind of adapter and every way to inject one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import peft.utils.transformers_weight_conversion as weight_conversion
from peft.tuners.tuners_utils import BaseTuner
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as LORA_TARGETS
from torch import nn

from swarm_plugins.backbone.peft_parts import follow_injection
from swarm_plugins.backbone.refusals import check_config
from swarm_plugins.backbone.standin import StandIn
from swarm_plugins.noise import ignore_peft_deprecation

_QUERY_VALUE = ("q_proj", "v_proj")
_DEFAULTS: dict[str, tuple[str, ...]] = {
    "qwen2_moe": _QUERY_VALUE,
    "qwen3": _QUERY_VALUE,
    "qwen3_moe": _QUERY_VALUE,
    "olmoe": _QUERY_VALUE,
    "gpt_oss": _QUERY_VALUE,
    "phimoe": _QUERY_VALUE,
    "prmoe": _QUERY_VALUE,
    "granitemoe": _QUERY_VALUE,
    "glm4_moe": _QUERY_VALUE,
    "ernie4_5_moe": _QUERY_VALUE,
    # Multi-head latent attention has no v_proj: the compressed projections take its place.
    "deepseek_v2": ("q_proj", "q_b_proj", "kv_b_proj"),
    "deepseek_v3": ("q_proj", "q_b_proj", "kv_b_proj"),
}
"""LoRA's default target modules for families missing in PEFT 0.21; drop each once PEFT's own table has it."""


@functools.cache
def watch_injection() -> None:
    """Installs the checks and defaults in PEFT. Idempotent."""
    add_lora_defaults()
    follow_injection()
    ignore_peft_deprecation()
    original, start = weight_conversion.convert_peft_config_for_transformers, BaseTuner.__init__

    @functools.wraps(original)
    def convert(peft_config: Any, model: nn.Module, conversions: Any) -> None:
        _check(peft_config, model)
        with keep_unset_targets(peft_config):
            original(peft_config, model=model, conversions=conversions)

    @functools.wraps(start)
    def init(self: Any, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        # Some methods read weights before they inject anything.
        _check(peft_config.get(adapter_name) if isinstance(peft_config, dict) else peft_config, model)
        start(self, model, peft_config, adapter_name, *args, **kwargs)

    weight_conversion.convert_peft_config_for_transformers = convert
    BaseTuner.__init__ = init  # type: ignore[method-assign]


def _check(config: Any, model: nn.Module) -> None:
    remote = [name for name, module in model.named_modules() if isinstance(module, StandIn)]
    if remote and config is not None:
        check_config(config, remote)


def add_lora_defaults() -> None:
    """Adds missing defaults to PEFT's table; existing entries stay."""
    for model_type, modules in _DEFAULTS.items():
        LORA_TARGETS.setdefault(model_type, list(modules))


@contextlib.contextmanager
def keep_unset_targets(config: Any) -> Iterator[None]:
    """Keeps unset targets unset through PEFT's conversion of a config.

    For Mixtral the conversion turns them into an empty list, with which PEFT 0.21 never looks up its defaults.
    """
    is_unset = getattr(config, "target_modules", None) is None and not getattr(config, "target_parameters", None)
    yield
    if is_unset and not config.target_modules and not getattr(config, "target_parameters", None):
        config.target_modules = None
