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
"""Settings of an adapter shown in messages."""
_OWN = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "init_lora_weights",
    "peft_version",
    "revision",
    "runtime_config",
)
"""Settings in which peers may differ: all take over the same weights."""


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
    if settings.config.discovery == "static":
        raise ConfigError(
            f"run {run_id!r} needs a swarm with a DHT, in which its peers find each other; this one has none "
            "(discovery='static'): use discovery='dht'"
        )
    versions = base_versions(module)
    configs = [one for part in module.modules() for one in (getattr(part, "peft_config", None) or {}).values()]
    return SharedRun(
        run_id,
        {name: one for name, one in module.named_parameters() if one.requires_grad},
        base=", ".join(version.key for version in versions),
        model=", ".join(version.name for version in versions),
        adapter="; ".join(dict.fromkeys(map(_described, configs))) or "none of PEFT's",
        settings="; ".join(dict.fromkeys(map(_settings, configs))),
        config=config,
        node=config.node_in(settings.initial_peers, settings.config.secret_file),
    )


def _described(config: Any) -> str:
    """Returns method, rank and target modules of an adapter, for people."""
    fields = {name: getattr(config, name, None) for name in _SHOWN}
    shown = [f"{name}={_text(value)}" for name, value in fields.items() if value]
    return " ".join([str(getattr(config.peft_type, "value", config.peft_type)), *shown])


def _settings(config: Any) -> str:
    """Returns all settings that decide what an adapter's tensors mean."""
    fields = {name: _text(value) for name, value in sorted(config.to_dict().items()) if name not in _OWN}
    return repr(fields)


def _text(value: Any) -> str:
    return ",".join(sorted(map(str, value))) if isinstance(value, (set, list, tuple)) else str(value)
