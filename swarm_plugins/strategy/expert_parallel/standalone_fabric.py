"""The expert-parallel strategy for the package ``lightning_fabric``."""

from __future__ import annotations

from lightning_fabric.strategies.ddp import DDPStrategy

from swarm_plugins.strategy.expert_parallel.fabric import ExpertParallelFabricStrategy


class FabricExpertParallelStrategy(ExpertParallelFabricStrategy, DDPStrategy):  # type: ignore[misc]  # the other package
    """As `swarm_plugins.FabricExpertParallelStrategy`, for ``lightning_fabric.Fabric``."""
