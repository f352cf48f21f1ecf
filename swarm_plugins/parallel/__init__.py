"""Expert parallelism on torch.distributed through transformers' registry (DeepSpeed-MoE, sections 4.1.3, 5.2, 5.3).

``parallelize`` distributes the experts of a loaded model, ``load_parallel`` loads one that no rank could hold whole;
``synchronize_gradients`` is all that a training loop adds.
"""

from __future__ import annotations

from swarm_plugins.parallel.apply import parallelize
from swarm_plugins.parallel.collectives import Traffic, count_traffic
from swarm_plugins.parallel.gradients import broadcast_parameters, clip_gradients, synchronize_gradients
from swarm_plugins.parallel.loading import load_parallel
from swarm_plugins.parallel.state import Parallelism, gather_state_dict, parallelism_of, scatter_state_dict

__all__ = [
    "Parallelism",
    "Traffic",
    "broadcast_parameters",
    "clip_gradients",
    "count_traffic",
    "gather_state_dict",
    "load_parallel",
    "parallelism_of",
    "parallelize",
    "scatter_state_dict",
    "synchronize_gradients",
]
