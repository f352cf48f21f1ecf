"""The strategy of a Trainer, as a mixin for the base class of either Lightning package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from swarm_plugins.strategy.averaging import refuse_averaging
from swarm_plugins.strategy.batches import check_batches
from swarm_plugins.strategy.reading import TrainerStrategyBase
from swarm_plugins.strategy.swarm.inspection import check_placed, check_trainable
from swarm_plugins.strategy.swarm.member import SwarmMember
from swarm_plugins.strategy.swarm.running import RunCallback
from swarm_plugins.strategy.swarm.state import (
    KEY,
    check_base,
    describe_base,
    load_trained,
    trained_state,
)

if TYPE_CHECKING:
    from lightning.pytorch.strategies import SingleDeviceStrategy as _Base
else:
    _Base = object


class TrainerStrategy(SwarmMember, TrainerStrategyBase, _Base):
    """Mixed in before the `SingleDeviceStrategy` of either package."""

    parallel_class: Any
    """The package's ParallelStrategy."""

    def set_world_ranks(self) -> None:
        """Numbers the processes; from then on the Trainer divides the data among several."""
        super().set_world_ranks()
        if self.is_distributed:
            self.parallel_class.register(type(self))

    def setup_environment(self) -> None:
        """Joins the swarm with all processes; a run that is trained together is joined when training starts.

        Raises:
            ConfigError: If a callback averages weights.
        """
        callbacks: list[Any] = self._module.trainer.callbacks
        refuse_averaging(
            self._module.trainer,
            "blocks may be on a swarm, and checkpoints hold only what is trained: leave it out, or average the "
            "trainable parameters in a callback of your own",
        )
        super().setup_environment()
        if self.run_id is not None and not any(isinstance(one, RunCallback) for one in callbacks):
            callbacks.insert(0, RunCallback(self))

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Runs around ``configure_model``: models loaded there have their blocks where the strategy says."""
        with self.loading():
            yield

    def setup(self, trainer: Any) -> None:
        """Checks the module, then sets up devices and optimizers, on all processes alike.

        Raises:
            UnsupportedError: If the module's model was not loaded there.
            ConfigError: If it is to be trained and has no adapter, or the processes have different ones.
        """
        with self.together():
            check_placed(self._module, self.place)
            if trainer.state.fn == "fit":
                check_trainable(self._module)
        super().setup(trainer)
        self.start_alike(self._module)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Ends an epoch of training for all processes when one has no more batches; others need no collectives.

        Raises:
            TransportError: If another process is lost.
        """
        return super().process_dataloader(dataloader) if self._module.trainer.training else dataloader

    def on_train_start(self) -> None:
        """Checks that all processes have as many batches, if they know how many.

        Raises:
            ConfigError: If one would wait for another that has no more.
        """
        if self.is_distributed:
            counts = [self._module.trainer.num_training_batches]
            check_batches("train", counts, self.root_device, "gradients of all of them are averaged in each step")

    def post_backward(self, closure_loss: Any) -> None:
        """Averages gradients over the processes, before clipping and the optimizer."""
        self.average([one for one in self._module.parameters() if one.requires_grad])

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the trained state."""
        return trained_state(self._module)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Saves a checkpoint that names the version of the base model."""
        described = {**checkpoint, KEY: describe_base(self._module)}
        super().save_checkpoint(described, filepath, storage_options=storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Restores the trained state.

        Raises:
            CheckpointError: If it was trained on another base model, or does not fit.
        """
        check_base(checkpoint, self._module)
        load_trained(self._module, checkpoint["state_dict"], strict=strict)
