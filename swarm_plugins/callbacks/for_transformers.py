"""`HubAdapterTrainerCallback`: publishes adapters from a Trainer of transformers (and of trl)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from swarm_plugins.callbacks.publishing import Publishing


class HubAdapterTrainerCallback(Publishing, TrainerCallback):
    """For the Trainer of transformers; arguments as for [`Publishing`][swarm_plugins.callbacks.publishing.Publishing].

    ```python
    Trainer(model, args, train_dataset=data, callbacks=[HubAdapterTrainerCallback("me/my-adapter")])
    ```
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Finds the adapter to publish.

        Raises:
            ConfigError: If the model has none.
        """
        self._metrics: dict[str, Any] = {}
        for earlier in state.log_history:  # of a run that is resumed
            if any(name.startswith("eval_") for name in earlier):  # not one of the training
                self.note_if_best(*self._monitored(args, earlier), earlier)
        if state.is_world_process_zero and model is not None:
            self.begin(model, Path(args.output_dir))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Publishes if the monitored metric has improved."""
        self._metrics = dict(metrics or {})
        monitor, mode = self._monitored(args, self._metrics)
        self.publish_if_best(monitor, mode, state.global_step, self._all_metrics(state))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "save" in self.on:
            self.publish("save", state.global_step, self._all_metrics(state))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publishes the final adapter and waits for pending uploads."""
        if "end" in self.on:
            if args.load_best_model_at_end and state.best_model_checkpoint is not None:
                # Its weights have been loaded. A better one since then was perhaps not saved.
                step = int(state.best_model_checkpoint.rpartition("-")[2])
                self.publish("end", step, self._metrics_at(state, step))
            else:
                self.publish("end", state.global_step, self._all_metrics(state))
        self.finish()

    def _monitored(self, args: Any, metrics: Mapping[str, Any]) -> tuple[str | None, str]:
        """Returns the metric's name in the metrics, and what is better."""
        monitor, mode = self.monitor, self.mode
        if monitor is None and args.metric_for_best_model is not None:
            monitor, mode = args.metric_for_best_model, "max" if args.greater_is_better else "min"
        return monitor if monitor is None or monitor in metrics else f"eval_{monitor}", mode

    def _all_metrics(self, state: Any) -> dict[str, Any]:
        return {"train_loss": _loss_at(state, state.global_step), **self._metrics}

    def _metrics_at(self, state: Any, step: int) -> dict[str, Any]:
        """Returns the figures of an earlier step that was evaluated."""
        found = {"train_loss": _loss_at(state, step)}
        for entry in state.log_history:
            if entry["step"] == step:
                found |= {name: value for name, value in entry.items() if name.startswith("eval_")}
        return found


def _loss_at(state: Any, step: int) -> float | None:
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry and entry["step"] <= step]
    return losses[-1] if losses else None
