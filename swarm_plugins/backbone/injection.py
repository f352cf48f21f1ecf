"""The one place where PEFT's injection is met: refuses what cannot work, and mends targets that were not given.

PEFT offers no hook before an injection; the conversion of old configs is the first thing it calls with config and
model, for every kind of adapter and every way to inject one.
"""

from __future__ import annotations

import functools
from typing import Any

import peft.utils.transformers_weight_conversion as weight_conversion
from torch import nn

from swarm_plugins.backbone.defaults import add_lora_defaults, keep_unset_targets
from swarm_plugins.backbone.refusals import check_config
from swarm_plugins.backbone.standin import StandIn
from swarm_plugins.noise import ignore_peft_deprecation

__all__ = ["watch_injection"]


@functools.cache
def watch_injection() -> None:
    """Puts the checks and defaults in PEFT's way. A second call does nothing."""
    add_lora_defaults()
    ignore_peft_deprecation()
    original = weight_conversion.convert_peft_config_for_transformers

    @functools.wraps(original)
    def convert(peft_config: Any, model: nn.Module, conversions: Any) -> None:
        remote = [name for name, module in model.named_modules() if isinstance(module, StandIn)]
        if remote:
            check_config(peft_config, remote)
        with keep_unset_targets(peft_config):
            original(peft_config, model=model, conversions=conversions)

    weight_conversion.convert_peft_config_for_transformers = convert
