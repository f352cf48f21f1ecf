"""PR-MoE, the mixture of experts of DeepSpeed-MoE (Rajbhandari et al. 2022, section 4.1), for transformers.

Names are resolved at first use: transformers' auto classes know the config without loading the models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_plugins.lazy import LazyNames

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

_NAMES = LazyNames(
    __name__,
    {
        "PRMoEConfig": ".prmoe.configuration",
        "PRMoEForCausalLM": ".prmoe.modeling",
        "PRMoEForSequenceClassification": ".prmoe.modeling",
        "PRMoEModel": ".prmoe.modeling",
        "from_deepspeed": ".deepspeed",
        "upcycle": ".upcycling",
    },
)
__getattr__, __dir__ = _NAMES.get, _NAMES.list
