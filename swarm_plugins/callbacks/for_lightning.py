"""`HubAdapterCallback`: publishes adapters from a Trainer of Lightning.

``lightning.pytorch`` and ``pytorch_lightning`` have two classes named Callback; this one is both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback as UnifiedCallback
from lightning.pytorch.callbacks import WeightAveraging as UnifiedAveraging
from pytorch_lightning.callbacks import Callback as StandaloneCallback
from pytorch_lightning.callbacks import WeightAveraging as StandaloneAveraging
from torch.distributed.tensor import DTensor

from swarm_plugins.callbacks.publishing import Publishing, log
from swarm_plugins.errors import ConfigError


class HubAdapterCallback(Publishing, UnifiedCallback, StandaloneCallback):  # type: ignore[misc]  # two Trainer types
    """For Lightning's Trainer; arguments as for [`Publishing`][swarm_plugins.callbacks.publishing.Publishing].

    In a run that is trained together, one peer publishes for all: give the callback to each.

    ```python
    Trainer(strategy="swarm", callbacks=[HubAdapterCallback("me/my-adapter", monitor="val_loss")])
    ```
    """

    _is_fit = True

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Notes whether a fit begins."""
        self._is_fit = stage == "fit"

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Finds the adapter to publish.

        Raises:
            ConfigError: If the module has none, or one whose tensors are divided over processes, or a callback
                averages weights.
        """
        if trainer.fast_dev_run:
            log.info("fast_dev_run: nothing is published to %s", self.repo_id)
            return
        if any(isinstance(one, DTensor) for one in pl_module.parameters() if one.requires_grad):
            # On every rank: gathering takes all of them, and only the first one publishes.
            raise ConfigError(
                "an adapter on experts that are divided over ranks cannot be published while it trains: leave the "
                "callback out, save what gather_state_dict(module, trained_only=True) returns, and use `swarm push`"
            )
        if any(isinstance(one, UnifiedAveraging | StandaloneAveraging) for one in trainer.callbacks):
            raise ConfigError(
                "WeightAveraging validates averages and then takes them back, so other weights would be published than "
                "were measured: leave it out, or publish the trained adapter afterwards, with `swarm push`"
            )
        if trainer.is_global_zero:
            self.begin(pl_module, Path(trainer.default_root_dir))
            no_hook = any(getattr(one, "save_weights_only", False) for one in trainer.checkpoint_callbacks)
            if "save" in self.on and no_hook:
                log.warning(
                    "with save_weights_only=True Lightning does not tell callbacks of a save: versions are published "
                    "at the best value and at the end only"
                )

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if "save" in self.on and trainer.global_step > 0:
            self._elected(trainer, lambda: self.publish("save", trainer.global_step, trainer.callback_metrics))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Publishes if the monitored metric has improved."""
        if not trainer.sanity_checking:
            monitor, mode = self.monitor, self.mode
            if monitor is None:
                keeper = next((one for one in trainer.checkpoint_callbacks if getattr(one, "monitor", None)), None)
                monitor, mode = (keeper.monitor, keeper.mode) if keeper is not None else (None, mode)
            step, metrics = trainer.global_step, trainer.callback_metrics
            self._elected(trainer, lambda: self.publish_if_best(monitor, mode, step, metrics))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if "end" in self.on:
            self._elected(trainer, lambda: self.publish("end", trainer.global_step, trainer.callback_metrics))

    def _elected(self, trainer: Any, publish: Callable[[], None]) -> None:
        """Publishes unless another peer of the run does; the weights that all peers share, if it is a run."""
        run = getattr(trainer.strategy, "shared_run", None)
        if run is None:
            publish()
        elif run.is_publisher:
            with run.shared:
                publish()
        else:
            log.info("another peer of run %s publishes to %s", run.run_id, self.repo_id)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Waits for pending uploads, after the servers were released."""
        self.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.interrupt(trainer.global_step, trainer.callback_metrics)

    @property
    def state_key(self) -> str:
        """Name of its state in a checkpoint: a Trainer may have a callback for each of several repositories."""
        return str(self._generate_state_key(repo_id=self.repo_id))

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Takes what earlier versions kept by the class's name; a state of its own is loaded afterwards."""
        earlier = checkpoint["callbacks"].get(type(self).__qualname__)
        if earlier is not None:
            self.load_state_dict(earlier)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Lightning also restores callbacks for `test` and `validate`, which must not change the training.
        if self._is_fit:
            self.best = state_dict.get("best")
