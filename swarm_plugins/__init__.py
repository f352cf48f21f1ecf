"""Fine-tune and use language models that do not fit your machine.

```text
AutoSwarmModelForCausalLM ...   HF's own model class, decoder layers on servers of a swarm
AutoSwarmModelForImageTextToText ...   the same for models that read images as well
insert_module                   a module of yours between two blocks, wherever these run
Speculation                     several tokens a trip: generate(custom_generate=Speculation(draft))
SwarmConfig                     deadlines, retries and codec of a client
PRMoEConfig, PRMoEForCausalLM ...   DeepSpeed-MoE's pyramid-residual mixture, known to HF's auto classes
upcycle, from_deepspeed         PR-MoE from a dense model, or from a DeepSpeed checkpoint
load_offloaded, OffloadConfig   HF's own model class, experts on disk and a bounded number in memory
parallelize                     HF's own model class, experts divided over the ranks of torch.distributed
load_remote_experts             HF's own model class, experts on other servers
SwarmStrategy, Fabric...        Lightning: Trainer(strategy="swarm"), Fabric(strategy="swarm")
RunConfig                       settings of a run in which several Trainers train one adapter
ExpertParallelStrategy, Fabric...   Lightning: Trainer(strategy="expert_parallel"), Fabric(strategy="expert_parallel")
make_student                    a shallower copy of a model (Mixture-of-Students of DeepSpeed-MoE)
StagedDistillation, StagedDistillationTrainerCallback   distill it from its teacher, until a step
HubAdapterCallback, HubAdapterTrainerCallback   publish adapters during training
SwarmMonitor                    Lightning: logs bytes, round trips, failures and retries of each step
save_only_trained               accelerate's save_state and load_state without the base
find_adapters, load_adapter     find published adapters; load one, checking the version of its base
LocalSwarm                      a swarm of `swarm serve` processes on this machine
swarm serve | status | demo     the same from the command line
```

Importing this package opens no socket, starts no process and loads no torch: names are resolved at first use. It makes
the strategy names "swarm" and "expert_parallel" known to Lightning and the model type "prmoe" to transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_plugins import autoload
from swarm_plugins.errors import SwarmError
from swarm_plugins.lazy import LazyNames

if TYPE_CHECKING:
    from swarm_plugins.backbone import (
        AutoSwarmModel,
        AutoSwarmModelForCausalLM,
        AutoSwarmModelForImageTextToText,
        AutoSwarmModelForSequenceClassification,
        insert_module,
    )
    from swarm_plugins.callbacks.distill_lightning import StagedDistillation
    from swarm_plugins.callbacks.distill_transformers import StagedDistillationTrainerCallback
    from swarm_plugins.callbacks.for_accelerate import save_only_trained
    from swarm_plugins.callbacks.for_lightning import HubAdapterCallback
    from swarm_plugins.callbacks.for_transformers import HubAdapterTrainerCallback
    from swarm_plugins.callbacks.loading import load_adapter
    from swarm_plugins.callbacks.monitoring import SwarmMonitor
    from swarm_plugins.client import SwarmConfig
    from swarm_plugins.distill import make_student
    from swarm_plugins.hub import find_adapters
    from swarm_plugins.local_swarm import LocalSwarm
    from swarm_plugins.models import (
        PRMoEConfig,
        PRMoEForCausalLM,
        PRMoEForSequenceClassification,
        PRMoEModel,
        from_deepspeed,
        upcycle,
    )
    from swarm_plugins.offload import OffloadConfig, load_offloaded
    from swarm_plugins.parallel import parallelize
    from swarm_plugins.remote_experts.load import load_remote_experts
    from swarm_plugins.speculation import Speculation
    from swarm_plugins.strategy.expert_parallel.unified import ExpertParallelStrategy, FabricExpertParallelStrategy
    from swarm_plugins.strategy.swarm.unified import FabricSwarmStrategy, SwarmStrategy
    from swarm_plugins.together import RunConfig

__all__ = [
    "AutoSwarmModel",
    "AutoSwarmModelForCausalLM",
    "AutoSwarmModelForImageTextToText",
    "AutoSwarmModelForSequenceClassification",
    "ExpertParallelStrategy",
    "FabricExpertParallelStrategy",
    "FabricSwarmStrategy",
    "HubAdapterCallback",
    "HubAdapterTrainerCallback",
    "LocalSwarm",
    "OffloadConfig",
    "PRMoEConfig",
    "PRMoEForCausalLM",
    "PRMoEForSequenceClassification",
    "PRMoEModel",
    "RunConfig",
    "Speculation",
    "StagedDistillation",
    "StagedDistillationTrainerCallback",
    "SwarmConfig",
    "SwarmError",
    "SwarmMonitor",
    "SwarmStrategy",
    "__version__",
    "find_adapters",
    "from_deepspeed",
    "insert_module",
    "load_adapter",
    "load_offloaded",
    "load_remote_experts",
    "make_student",
    "parallelize",
    "save_only_trained",
    "upcycle",
]

__version__ = "0.1.0"

_NAMES = LazyNames(
    __name__,
    {
        "AutoSwarmModel": "swarm_plugins.backbone",
        "AutoSwarmModelForCausalLM": "swarm_plugins.backbone",
        "AutoSwarmModelForImageTextToText": "swarm_plugins.backbone",
        "AutoSwarmModelForSequenceClassification": "swarm_plugins.backbone",
        "ExpertParallelStrategy": "swarm_plugins.strategy.expert_parallel.unified",
        "FabricExpertParallelStrategy": "swarm_plugins.strategy.expert_parallel.unified",
        "FabricSwarmStrategy": "swarm_plugins.strategy.swarm.unified",
        "HubAdapterCallback": "swarm_plugins.callbacks.for_lightning",
        "HubAdapterTrainerCallback": "swarm_plugins.callbacks.for_transformers",
        "LocalSwarm": "swarm_plugins.local_swarm",
        "OffloadConfig": "swarm_plugins.offload",
        "PRMoEConfig": "swarm_plugins.models",
        "PRMoEForCausalLM": "swarm_plugins.models",
        "PRMoEForSequenceClassification": "swarm_plugins.models",
        "PRMoEModel": "swarm_plugins.models",
        "RunConfig": "swarm_plugins.together",
        "Speculation": "swarm_plugins.speculation",
        "StagedDistillation": "swarm_plugins.callbacks.distill_lightning",
        "StagedDistillationTrainerCallback": "swarm_plugins.callbacks.distill_transformers",
        "SwarmConfig": "swarm_plugins.client",
        "SwarmMonitor": "swarm_plugins.callbacks.monitoring",
        "SwarmStrategy": "swarm_plugins.strategy.swarm.unified",
        "find_adapters": "swarm_plugins.hub",
        "from_deepspeed": "swarm_plugins.models",
        "insert_module": "swarm_plugins.backbone",
        "load_adapter": "swarm_plugins.callbacks.loading",
        "load_offloaded": "swarm_plugins.offload",
        "make_student": "swarm_plugins.distill",
        "parallelize": "swarm_plugins.parallel",
        "load_remote_experts": "swarm_plugins.remote_experts.load",
        "save_only_trained": "swarm_plugins.callbacks.for_accelerate",
        "upcycle": "swarm_plugins.models",
    },
)
__getattr__, __dir__ = _NAMES.get, _NAMES.list

autoload.install()
