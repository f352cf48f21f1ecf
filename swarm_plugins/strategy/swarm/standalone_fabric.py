"""The strategy for the package ``lightning_fabric``, whose base class differs from that in ``lightning``."""

from __future__ import annotations

from lightning_fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning_fabric.strategies.single_device import SingleDeviceStrategy

from swarm_plugins.strategy.swarm.fabric import FabricStrategy


class FabricSwarmStrategy(FabricStrategy, SingleDeviceStrategy):  # type: ignore[misc]  # typed for the other package
    """As `swarm_plugins.FabricSwarmStrategy`, for ``lightning_fabric.Fabric``."""

    launcher_class = _SubprocessScriptLauncher
