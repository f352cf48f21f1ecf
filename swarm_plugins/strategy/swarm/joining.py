"""Makes the run in which a module is trained together, from the module and the swarm that it uses."""

from __future__ import annotations

from typing import Any

from torch import nn

from swarm_plugins.backbone.context import SwarmSettings
from swarm_plugins.errors import ConfigError
from swarm_plugins.strategy.swarm.inspection import base_versions
from swarm_plugins.together.config import RunConfig
from swarm_plugins.together.shared_run import SharedRun

_SHOWN = ("r", "lora_alpha", "target_modules", "target_parameters", "num_virtual_tokens", "use_rslora")
"""What is said of an adapter."""


def make_run(module: nn.Module, run_id: str, config: RunConfig, settings: SwarmSettings | None) -> SharedRun:
    """Returns the run in which a module's trainable parameters are trained together.

    Raises:
        ConfigError: If no swarm is known, or it has no DHT.
    """
    if settings is None:
        raise ConfigError(
            f"run {run_id!r} needs a swarm, in which its peers find each other: pass initial_peers=[...] to the "
            "strategy, or set SWARM_INITIAL_PEERS"
        )
    return SharedRun(
        run_id,
        {name: one for name, one in module.named_parameters() if one.requires_grad},
        base=", ".join(str(version) for version in base_versions(module)),
        adapter=_described(module),
        config=config,
        node=config.node(settings.initial_peers, settings.config.secret_file),
    )


def _described(module: nn.Module) -> str:
    """Returns method, rank and target modules of a module's adapters, for people."""
    texts = []
    for part in module.modules():
        for config in (getattr(part, "peft_config", None) or {}).values():
            fields = {name: getattr(config, name, None) for name in _SHOWN}
            shown = [f"{name}={_text(value)}" for name, value in fields.items() if value]
            texts.append(" ".join([str(getattr(config.peft_type, "value", config.peft_type)), *shown]))
    return "; ".join(dict.fromkeys(texts)) or "none of PEFT's"


def _text(value: Any) -> str:
    return ",".join(sorted(value)) if isinstance(value, (set, list, tuple)) else str(value)
