"""The expert-parallel strategies for the package ``lightning``."""

from __future__ import annotations

from lightning.fabric.strategies.ddp import DDPStrategy as _FabricDDP
from lightning.pytorch.strategies import DDPStrategy as _TrainerDDP

from swarm_plugins.strategy.expert_parallel.fabric import ExpertParallelFabricStrategy
from swarm_plugins.strategy.expert_parallel.trainer import ExpertParallelTrainerStrategy


class ExpertParallelStrategy(ExpertParallelTrainerStrategy, _TrainerDDP):
    """Trains a LightningModule with the experts of its Hugging Face model divided over ranks, each with own batches.

    ``Trainer(strategy="expert_parallel", devices=N)`` makes one without arguments. When the Trainer sets up the module,
    :func:`swarm_plugins.parallelize` distributes its experts; gradients are synchronized once per optimizer step and
    clipped by their norm over all ranks. Checkpoints hold whole tensors, as those of one process.
    For ``pytorch_lightning`` use ``swarm_plugins.strategy.expert_parallel.standalone.ExpertParallelStrategy``, or the
    name.

    Args:
        ep_size: Ranks of a group that hold distinct experts: an int, a list with one entry per decoder layer, a dict by
            layer index, or "auto" for the largest size that divides a layer's experts and the ranks.
        ep_implementation: How tokens reach their experts, as in :func:`swarm_plugins.parallelize`.
        expert_slices: Ranks that an expert's intermediate dimension is divided over.
        tp_size: Neighboring ranks that share a batch and divide the dense layers.
        ranks_per_node: For the hierarchical exchange. None: as torchrun says.
        timeout_s: Deadline of each collective: how long a rank may be late.

    Raises:
        ConfigError: If another option is given.
    """


class FabricExpertParallelStrategy(ExpertParallelFabricStrategy, _FabricDDP):
    """Distributes the experts of a Hugging Face mixture over several ranks in ``fabric.setup()``.

    Takes the arguments of `ExpertParallelStrategy`. For ``lightning_fabric`` use
    ``swarm_plugins.strategy.expert_parallel.standalone_fabric.FabricExpertParallelStrategy``, or the name.
    """
