"""`StagedDistillation`: staged distillation in a Trainer of Lightning.

``lightning.pytorch`` and ``pytorch_lightning`` have two classes named Callback; this one is both.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback as UnifiedCallback
from pytorch_lightning.callbacks import Callback as StandaloneCallback

from swarm_plugins.callbacks.distilling import StagedTraining


class StagedDistillation(StagedTraining, UnifiedCallback, StandaloneCallback):  # type: ignore[misc]  # two Trainer types
    """Staged distillation in Lightning; see [`StagedTraining`][swarm_plugins.callbacks.distilling.StagedTraining].

    Logs ``kd_weight`` (0: the stage is off), ``kd_loss`` and ``lm_loss``.

    ```python
    Trainer(max_steps=1000, callbacks=[StagedDistillation("teacher-directory", stop_at=0.7)])
    ```
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forgets what an earlier call has loaded: Lightning also restores callbacks for ``test`` and ``validate``."""
        if stage == "fit":
            self._loaded_stop = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Loads the teacher, unless the resumed run is past the stop.

        Raises:
            ConfigError: If the module has no student, or the teacher does not fit it.
        """
        # As TextData and many data modules have one.
        tokenizer = getattr(trainer.datamodule, "tokenizer", None)
        self.start(pl_module, _total_steps(trainer), trainer.global_step, tokenizer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.at(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs, and frees the teacher at the stop."""
        for name, value in {**self.take_metrics(), "kd_weight": self.weight}.items():
            pl_module.log(name, value)
        self.move_on(trainer.global_step)
        self.pause()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.end()


def _total_steps(trainer: Any) -> float:
    """Returns the optimizer steps of a run as ``global_step`` counts them, over all optimizers."""
    # Lightning's estimate is in batches that step, but never above max_steps.
    total: float = trainer.estimated_stepping_batches * max(1, len(trainer.optimizers))
    return total if trainer.max_steps < 0 else min(total, trainer.max_steps)
