"""PR-MoE, the mixture of experts of DeepSpeed-MoE (Rajbhandari et al. 2022, section 4.1), for transformers.

Names are resolved at first use: transformers' auto classes know the config without loading the models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm_plugins.models.deepspeed import from_deepspeed
    from swarm_plugins.models.prmoe.configuration import PRMoEConfig
    from swarm_plugins.models.prmoe.modeling import PRMoEForCausalLM, PRMoEForSequenceClassification, PRMoEModel
    from swarm_plugins.models.upcycling import upcycle

__all__ = [
    "PRMoEConfig",
    "PRMoEForCausalLM",
    "PRMoEForSequenceClassification",
    "PRMoEModel",
    "from_deepspeed",
    "upcycle",
]

_HOMES = {
    "PRMoEConfig": "swarm_plugins.models.prmoe.configuration",
    "PRMoEForCausalLM": "swarm_plugins.models.prmoe.modeling",
    "PRMoEForSequenceClassification": "swarm_plugins.models.prmoe.modeling",
    "PRMoEModel": "swarm_plugins.models.prmoe.modeling",
    "from_deepspeed": "swarm_plugins.models.deepspeed",
    "upcycle": "swarm_plugins.models.upcycling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
