"""Training in the demonstration: an ordinary Lightning module, measured and published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from swarm_plugins.callbacks.for_lightning import HubAdapterCallback
from swarm_plugins.demo.evaluation import losses_of
from swarm_plugins.demo.progress import Progress
from swarm_plugins.demo.text import Pieces
from swarm_plugins.errors import ConfigError, SwarmError
from swarm_plugins.recipes.language import AdapterTuner

PROMPT_TEXT = "An address of the President of the United States to both houses of Congress:"
METHODS: dict[str, tuple[dict[str, Any], float]] = {
    "lora": (
        {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        2e-3,
    ),
    "prompt": (
        {
            "peft_type": "PROMPT_TUNING",
            "num_virtual_tokens": 16,
            "prompt_tuning_init": "TEXT",
            "prompt_tuning_init_text": PROMPT_TEXT,
        },
        1e-2,
    ),
}
"""PEFT's settings and the learning rate, by name."""
_BATCH = 2


class DemoTuner(AdapterTuner):
    """The recipes' tuner with a method of ``METHODS``; keeps the losses on ``[pieces, length]`` before and after."""

    def __init__(self, base: Path, method: str, held_out: Tensor) -> None:
        if method not in METHODS:
            raise ConfigError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
        settings, learning_rate = METHODS[method]
        if method == "prompt":
            settings = {**settings, "tokenizer_name_or_path": str(base)}
        super().__init__(str(base), settings, learning_rate)
        self.pieces = held_out
        self.before = torch.empty(0)
        self.after = torch.empty(0)

    @property
    def tuned(self) -> Any:
        """The model with its adapter."""
        if self.model is None:
            raise RuntimeError("the model is loaded in configure_model, which a Trainer calls")
        return self.model

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]  # rows only
        """Returns the loss of a batch."""
        return super().training_step({"input_ids": batch[0], "labels": batch[0]}, batch_idx)


class _Measure(Callback):
    """Measures the held-out loss; goes before the publishing callback, so that the card has it."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        with pl_module.tuned.disable_adapter():
            pl_module.before = losses_of(pl_module.tuned, pl_module.pieces, "held-out loss before")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.after = losses_of(pl_module.tuned, pl_module.pieces, "held-out loss after")
        trainer.callback_metrics["val_loss"] = pl_module.after.mean()


class _Bar(Callback):
    """Shows the progress of the training."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._progress: Progress | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # Not earlier: measuring the loss shows its own progress.
        self._progress = self._progress or Progress("training", self._steps, "steps")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._progress is not None:
            self._progress.advance(note=f"loss {float(outputs['loss']):.3f}")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._progress is not None:
            self._progress.close()


def tune(
    model: Path,
    method: str,
    pieces: Pieces,
    *,
    steps: int,
    folder: Path,
    repo: str,
    endpoint: str,
    token: str,
) -> tuple[DemoTuner, str]:
    """Trains an adapter on the active swarm, measures it, and publishes it; returns the module and the version's tag.

    Raises:
        SwarmError: If the adapter could not be published.
    """
    pl.seed_everything(0, verbose=False)
    tuner = DemoTuner(model, method, pieces.held_out)
    publish = HubAdapterCallback(repo, on=["end"], folder=folder / "adapters", endpoint=endpoint, token=token)
    generator = torch.Generator().manual_seed(0)
    data = DataLoader(TensorDataset(pieces.train), batch_size=_BATCH, shuffle=True, drop_last=True, generator=generator)
    trainer = pl.Trainer(
        strategy="swarm",
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[_Measure(), _Bar(steps), publish],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(tuner, data)
    except SystemExit:
        # Lightning raises this on Ctrl-C, after notifying its callbacks.
        raise KeyboardInterrupt from None
    if not publish.pushed:
        raise SwarmError(f"the adapter was not published; it is in {folder / 'adapters'}")
    return tuner, publish.pushed[-1].tag
