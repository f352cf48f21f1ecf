"""The expert-parallel strategy for the package ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning.strategies import DDPStrategy

from swarm_plugins.strategy.expert_parallel.trainer import ExpertParallelTrainerStrategy


class ExpertParallelStrategy(ExpertParallelTrainerStrategy, DDPStrategy):  # type: ignore[misc]  # for the other package
    """As `swarm_plugins.ExpertParallelStrategy`, for a Trainer of ``pytorch_lightning``."""
