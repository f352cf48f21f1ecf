"""The strategy for the package ``pytorch_lightning``, whose base class differs from that in ``lightning``."""

from __future__ import annotations

from pytorch_lightning.strategies import ParallelStrategy, SingleDeviceStrategy
from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher

from swarm_plugins.strategy.swarm.trainer import TrainerStrategy


class SwarmStrategy(TrainerStrategy, SingleDeviceStrategy):  # type: ignore[misc]  # typed for the other package
    """As `swarm_plugins.SwarmStrategy`, for a Trainer of ``pytorch_lightning``."""

    launcher_class = _SubprocessScriptLauncher
    parallel_class = ParallelStrategy
