"""Mixture-of-experts models that do not fit one's own machine: use them and train adapters on them.

```text
AutoSwarmModelForCausalLM ...   HF's own model class, its decoder layers on other people's servers
SwarmConfig                     deadlines, retries and codec of a client
SwarmStrategy, Fabric...        Lightning: Trainer(strategy="swarm"), Fabric(strategy="swarm")
LocalSwarm                      a swarm of `swarm serve` processes on this machine
swarm serve | status | bench    the same from the command line
```

Importing this package opens no socket, starts no process and loads no torch: names are resolved at first use. It makes
the strategy name "swarm" known to Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from swarm_plugins import autoload
from swarm_plugins.errors import SwarmError

if TYPE_CHECKING:
    from swarm_plugins.backbone import (
        AutoSwarmModel,
        AutoSwarmModelForCausalLM,
        AutoSwarmModelForSequenceClassification,
    )
    from swarm_plugins.client import SwarmConfig
    from swarm_plugins.local_swarm import LocalSwarm
    from swarm_plugins.strategy.unified import FabricSwarmStrategy, SwarmStrategy

__all__ = [
    "AutoSwarmModel",
    "AutoSwarmModelForCausalLM",
    "AutoSwarmModelForSequenceClassification",
    "FabricSwarmStrategy",
    "LocalSwarm",
    "SwarmConfig",
    "SwarmError",
    "SwarmStrategy",
    "__version__",
]

__version__ = "0.1.0"

_HOMES = {
    "AutoSwarmModel": "swarm_plugins.backbone",
    "AutoSwarmModelForCausalLM": "swarm_plugins.backbone",
    "AutoSwarmModelForSequenceClassification": "swarm_plugins.backbone",
    "FabricSwarmStrategy": "swarm_plugins.strategy.unified",
    "LocalSwarm": "swarm_plugins.local_swarm",
    "SwarmConfig": "swarm_plugins.client",
    "SwarmStrategy": "swarm_plugins.strategy.unified",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


autoload.install()
