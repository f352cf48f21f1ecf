"""The strategies for the package ``lightning``."""

from __future__ import annotations

from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as _FabricLauncher
from lightning.fabric.strategies.single_device import SingleDeviceStrategy as _FabricDevice
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies import SingleDeviceStrategy as _TrainerDevice
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as _TrainerLauncher

from swarm_plugins.strategy.swarm.fabric import FabricStrategy
from swarm_plugins.strategy.swarm.trainer import TrainerStrategy


class SwarmStrategy(TrainerStrategy, _TrainerDevice):
    """Trains a module whose blocks run on a swarm, or offloaded or in memory here; saves the trained tensors only.

    ``Trainer(strategy="swarm")`` makes one without arguments. It joins the swarm when fitting starts, before
    ``configure_model``, and models loaded there use it. With ``devices=N``, N processes send batches of their own and
    average gradients of what is trained. For ``pytorch_lightning`` use
    ``swarm_plugins.strategy.swarm.standalone.SwarmStrategy``, or the name.

    Args:
        initial_peers: Addresses of peers to join the swarm through. None: from ``SWARM_INITIAL_PEERS``, or else from
            the call that loads the model.
        swarm: Deadlines, retries and codec of the client.
        offload: Runs all blocks on this machine instead: an `OffloadConfig`, or its text such as ``fast=8GB``, leaves
            experts on disk; ``none`` has all in memory. None: from ``SWARM_OFFLOAD``, or else on a swarm. Checkpoints
            go on in any of the three places.
        run_id: Name of a run: all Trainers that name it improve one adapter together. None: from ``SWARM_RUN_ID``, or
            else this Trainer trains alone.
        run: Settings of the run.
        timeout_s: Deadline of each collective with ``devices=N``: how long a process may be late.
    """

    launcher_class = _TrainerLauncher
    parallel_class = ParallelStrategy


class FabricSwarmStrategy(FabricStrategy, _FabricDevice):
    """Trains with Fabric: load the model inside ``fabric.init_module()``, after ``fabric.launch()``.

    Takes the arguments of `SwarmStrategy`. For ``lightning_fabric`` use
    ``swarm_plugins.strategy.swarm.standalone_fabric.FabricSwarmStrategy``, or the name.
    """

    launcher_class = _FabricLauncher
