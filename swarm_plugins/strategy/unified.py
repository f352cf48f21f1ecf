"""The strategies for the package ``lightning``."""

from __future__ import annotations

from lightning.fabric.strategies.single_device import SingleDeviceStrategy as _FabricDevice
from lightning.pytorch.strategies import SingleDeviceStrategy as _TrainerDevice

from swarm_plugins.strategy.fabric import FabricStrategy
from swarm_plugins.strategy.trainer import TrainerStrategy


class SwarmStrategy(TrainerStrategy, _TrainerDevice):
    """Trains a module whose blocks run on a swarm: one client, one device, checkpoints of what is trained.

    ``Trainer(strategy="swarm")`` makes one without arguments. The swarm is joined when fitting starts, before
    ``configure_model``; models that are loaded there find it. For ``pytorch_lightning`` use
    ``swarm_plugins.strategy.standalone.SwarmStrategy``, or the name.

    Args:
        initial_peers: Addresses of peers to join the swarm through. None: from the environment variable
            ``SWARM_INITIAL_PEERS``; if that is not set either, the model must name them when it is loaded.
        swarm: How the client behaves: deadlines, retries, codec.
    """


class FabricSwarmStrategy(FabricStrategy, _FabricDevice):
    """The same for Fabric: load the model inside ``fabric.init_module()``, after ``fabric.launch()``.

    For ``lightning_fabric`` use ``swarm_plugins.strategy.standalone_fabric.FabricSwarmStrategy``, or the name.

    Args:
        initial_peers: Addresses of peers to join the swarm through. None: from the environment variable
            ``SWARM_INITIAL_PEERS``; if that is not set either, the model must name them when it is loaded.
        swarm: How the client behaves: deadlines, retries, codec.
    """
