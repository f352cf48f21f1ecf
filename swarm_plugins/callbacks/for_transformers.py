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
        for earlier in state.log_history:  # of a run that is resumed
            if _is_evaluation(earlier):
                self.note_if_best(*self._monitored(args, earlier), earlier)
        if state.is_world_process_zero and model is not None:
            self.begin(model, Path(args.output_dir))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Publishes if the monitored metric has improved."""
        found = self._metrics_at(state, state.global_step) | dict(metrics or {})
        monitor, mode = self._monitored(args, found)
        self.publish_if_best(monitor, mode, state.global_step, found)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "save" in self.on:
            self.publish("save", state.global_step, self._metrics_at(state, state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publishes the final adapter and waits for pending uploads."""
        if "end" in self.on:
            step = state.global_step
            if args.load_best_model_at_end and state.best_model_checkpoint is not None:
                # Its weights have been loaded. A better one since then was perhaps not saved.
                step = int(state.best_model_checkpoint.rpartition("-")[2])
            self.publish("end", step, self._metrics_at(state, step))
        self.finish()

    def _monitored(self, args: Any, metrics: Mapping[str, Any]) -> tuple[str | None, str]:
        """Returns the metric's name in the metrics, and what is better."""
        monitor, mode = self.monitor, self.mode
        if monitor is None and args.metric_for_best_model is not None:
            monitor, mode = args.metric_for_best_model, "max" if args.greater_is_better else "min"
        return monitor if monitor is None or monitor in metrics else f"eval_{monitor}", mode

    def _metrics_at(self, state: Any, step: int) -> dict[str, Any]:
        """Returns the metrics of the last evaluation up to a step, of all its datasets."""
        found: dict[str, Any] = {"train_loss": _loss_at(state, step)}
        evaluated = [entry for entry in state.log_history if entry["step"] <= step and _is_evaluation(entry)]
        for entry in evaluated:
            if entry["step"] == evaluated[-1]["step"]:
                found |= {name: value for name, value in entry.items() if name.startswith("eval_")}
        return found


def _is_evaluation(entry: Mapping[str, Any]) -> bool:
    return any(name.startswith("eval_") for name in entry)


def _loss_at(state: Any, step: int) -> float | None:
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry and entry["step"] <= step]
    return losses[-1] if losses else None
