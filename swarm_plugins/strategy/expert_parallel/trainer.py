"""The expert-parallel strategy of a Trainer, as a mixin for the base class of either Lightning package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from swarm_plugins.errors import ConfigError, UnsupportedError
from swarm_plugins.parallel import gather_state_dict
from swarm_plugins.parallel.agreement import translated
from swarm_plugins.parallel.state import is_parallel
from swarm_plugins.strategy.averaging import refuse_averaging
from swarm_plugins.strategy.batches import check_batches
from swarm_plugins.strategy.expert_parallel.member import ExpertParallelMember
from swarm_plugins.strategy.expert_parallel.state import load_whole_state
from swarm_plugins.strategy.reading import TrainerStrategyBase

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class ExpertParallelTrainerStrategy(ExpertParallelMember, TrainerStrategyBase, _Base):
    """Mixed in before the `DDPStrategy` of either package: processes, launcher and collectives are those of DDP."""

    def take_precision(self, plugin: Any) -> None:
        """Has a precision plugin clip gradients by their norm over all ranks.

        Raises:
            ConfigError: If it cannot work.
        """
        super().take_precision(plugin)
        if plugin is not None:
            plugin.clip_grad_by_norm = lambda optimizer, limit: self.clip_norm(self._module, optimizer, limit)
            plugin.clip_grad_by_value = lambda optimizer, limit: self.clip_values(self._module, optimizer, limit)

    def setup_environment(self) -> None:
        """Starts the processes' group.

        Raises:
            ConfigError: If a callback averages weights.
        """
        refuse_averaging(
            self._module.trainer,
            "each rank holds only its own experts: leave it out, or average the tensors of several checkpoints",
        )
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Moves the module to its device, distributes its experts and makes the optimizers.

        Raises:
            UnsupportedError: If it holds no mixture of experts.
            ConfigError: If the sizes do not fit, on every rank.
        """
        if self._layer_sync is not None:
            raise ConfigError("sync_batchnorm=True has no meaning for strategy 'expert_parallel': leave it out")
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self._module)
        self.model_to_device()
        self.distribute(self._module)
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                self.prepare(optimizer)
        self.setup_precision_plugin()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Synchronizes gradients before the hook ``on_before_optimizer_step``, then steps."""
        return super().optimizer_step(optimizer, self.after(closure, self._module, optimizer), model, **kwargs)

    def on_train_start(self) -> None:
        """Checks that all ranks have as many batches."""
        self._check_batches("train", [self._module.trainer.num_training_batches])

    def on_validation_start(self) -> None:
        """Checks that all ranks have as many batches."""
        trainer = self._module.trainer
        counts = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        self._check_batches("val", counts)

    def on_test_start(self) -> None:
        """Checks that all ranks have as many batches."""
        self._check_batches("test", self._module.trainer.num_test_batches)

    def on_predict_start(self) -> None:
        """Checks that all ranks have as many batches."""
        self._check_batches("predict", self._module.trainer.num_predict_batches)

    def _check_batches(self, stage: str, counts: Sequence[float]) -> None:
        check_batches(stage, counts, self.root_device, "experts on other ranks need all of them in each forward")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the state of the whole module on rank 0, as one process would have it, and nothing elsewhere.

        Raises:
            UnsupportedError: After an error, which other ranks may not have had.
            TransportError: If another rank is lost.
        """
        if self._module.trainer.state.status == "interrupted" and self.world_size > 1:
            raise UnsupportedError(
                "no checkpoint can be made after an error: every rank would have to take part, and the others may be "
                "in another step. Save during training, with ModelCheckpoint(every_n_train_steps=...)"
            )
        return gather_state_dict(self._module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the whole state of an optimizer on rank 0, as one process would have it, and nothing elsewhere."""
        return self.whole_state_of(optimizer)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads whole tensors, before or after the experts are distributed."""
        if is_parallel(self._module):
            load_whole_state(self._module, checkpoint["state_dict"], strict=strict)
        else:
            super().load_model_state_dict(checkpoint, strict=strict)

    def reduce(self, *args: Any, **kwargs: Any) -> Tensor:
        """Reduces a value over the ranks.

        Raises:
            TransportError: If another rank is lost.
        """
        with translated("a reduction"):
            return super().reduce(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for the other ranks.

        Raises:
            TransportError: If another rank is lost.
        """
        with translated("a barrier"):
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns an object of one rank on all ranks.

        Raises:
            TransportError: If another rank is lost.
        """
        with translated("a broadcast"):
            return super().broadcast(obj, src)

    def teardown(self) -> None:
        """Ends the plugins; the module stays on its device, where its ranks can still gather it."""
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
