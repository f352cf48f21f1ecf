"""`StagedDistillationTrainerCallback`: staged distillation in a Trainer of transformers (and of trl)."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from swarm_plugins.callbacks.distilling import StagedTraining

# Where the Trainer's checkpoints keep it: in the states of callbacks, whether or not these are to be restored.
_STATE_KEY = "swarm_plugins.StagedDistillation"


class StagedDistillationTrainerCallback(StagedTraining, TrainerCallback):
    """Staged distillation in transformers' Trainer; takes the arguments of `StagedTraining`.

    Adds ``kd_weight`` (0: the stage is off), ``kd_loss`` and ``lm_loss`` to what the Trainer logs.

    ```python
    Trainer(model, args, train_dataset=data, callbacks=[StagedDistillationTrainerCallback("teacher", stop_at=0.7)])
    ```
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Loads the teacher, unless the resumed run is past the stop.

        Raises:
            ConfigError: If there is no student, or the teacher does not fit it.
        """
        stored = state.stateful_callbacks.get(_STATE_KEY)
        if stored is not None:
            self.load_state_dict(stored["attributes"])
        self.start(model, state.max_steps, state.global_step, kwargs.get("processing_class"))
        state.stateful_callbacks[_STATE_KEY] = {"args": {}, "attributes": self.state_dict()}
        self._logged_weight = self.weight

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at(state.global_step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Checks that the first batch was distilled."""
        self.move_on(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Frees the teacher at the stop."""
        self._logged_weight = self.weight
        self.move_on(state.global_step)
        self.pause()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Adds the metrics to the entry of a training loss."""
        if logs is None or "loss" not in logs:
            return
        means = {name: value.item() for name, value in self.take_metrics().items()}
        metrics = {**means, "kd_weight": self._logged_weight}
        logs.update(metrics)
        # The Trainer has copied the entry by now.
        state.log_history[-1].update(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end()
