"""An adapter from the words of a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from swarm_plugins.backbone.refusals import WHAT_WORKS
from swarm_plugins.errors import ConfigError

__all__ = ["adapter_config"]


def adapter_config(settings: Mapping[str, Any], *, task_type: str) -> PeftConfig:
    """Returns PEFT's config of an adapter.

    Args:
        settings: ``peft_type`` and the settings that PEFT has for it.
        task_type: PEFT's name of the task.

    Raises:
        ConfigError: If the type or a setting does not exist.
    """
    kind = str(settings.get("peft_type", "")).upper()
    known = PEFT_TYPE_TO_CONFIG_MAPPING
    if kind not in {str(name.value) for name in known}:
        raise ConfigError(
            f"adapter.peft_type is {settings.get('peft_type')!r}, which PEFT does not know; {WHAT_WORKS}: LORA, IA3, "
            "PROMPT_TUNING, P_TUNING or PREFIX_TUNING"
        )
    chosen = next(config for name, config in known.items() if name.value == kind)
    allowed = sorted(field.name for field in dataclasses.fields(chosen) if field.init)
    unknown = sorted(set(settings) - set(allowed) - {"peft_type"})
    if unknown:
        raise ConfigError(f"adapter has no setting {unknown[0]!r}; {kind} has {', '.join(allowed)}")
    config: PeftConfig = chosen(**{**settings, "peft_type": kind, "task_type": task_type})
    return config
