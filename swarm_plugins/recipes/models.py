"""Training of whole models: the modules of ``recipes/prmoe.yaml`` and ``recipes/mos.yaml``."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from swarm_plugins.callbacks.distill_lightning import StagedDistillation
from swarm_plugins.distill import make_student
from swarm_plugins.errors import CheckpointError, ConfigError, one_line
from swarm_plugins.hub import save_student
from swarm_plugins.hub.folder import move_to_free_name
from swarm_plugins.hub.names import check_repo_id
from swarm_plugins.hub_errors import WrongTypeError

log = logging.getLogger(__name__)


class ModelTuner(pl.LightningModule):
    """Trains all weights of a causal language model: a new one, or one that exists.

    Args:
        base: Directory or Hub id of the model to train. None: a new one.
        config: Settings of a new model, with its ``model_type``. The size of the vocabulary is the tokenizer's.
        learning_rate: Step size of AdamW.
        weight_decay: Weight decay of AdamW.
        revision: Branch, tag or commit of the base on the Hub.
        output: Folder for the model and its tokenizer; numbered if it exists. None: only checkpoints hold them.
    """

    def __init__(
        self,
        base: str | None = None,
        config: dict[str, Any] | None = None,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        revision: str | None = None,
        output: str | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.revision = revision
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.output = output
        self._config = config
        self._whole: dict[str, Any] = {}
        self.model: PreTrainedModel | None = None
        self.saved: Path | None = None
        """Folder that the model was written to, after the run."""

    def make_model(self) -> PreTrainedModel:
        """Returns the model to train, in float32: AdamW's small steps get lost in the rounding of half precision.

        Raises:
            ConfigError: If the base does not exist, or a setting of the new model is wrong.
        """
        return self._new() if self.base is None else self._loaded(self.base, torch.float32)

    def _loaded(self, base: str, dtype: torch.dtype | str) -> PreTrainedModel:
        try:
            found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, revision=self.revision, dtype=dtype)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"base {base!r} cannot be loaded ({one_line(error)}); give the directory of a causal language "
                "model, or its id on the Hub"
            ) from error
        return found

    def configure_model(self) -> None:
        """Makes the model, once."""
        if self.model is None:
            self.model = self.make_model().train()

    def forward(self, **batch: Tensor) -> Any:
        """Returns HF's model output, with the loss if there are labels."""
        if self.model is None:
            raise RuntimeError("the model is made in configure_model, which a Trainer calls")
        return self.model(**batch, use_cache=False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Returns the loss of a batch."""
        loss: Tensor = self(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Logs the loss of a held-out batch."""
        self.log("val_loss", self(**batch).loss, prog_bar=True, batch_size=len(batch["input_ids"]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW over all weights."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)

    def on_fit_end(self) -> None:
        """Writes the model next to those of earlier runs."""
        if self.output is not None and self.model is not None:
            # On every rank: a strategy may have divided the weights.
            whole = self.trainer.strategy.lightning_module_state_dict()
            self._whole = {name.removeprefix("model."): value for name, value in whole.items()}
            if self.trainer.is_global_zero:
                self._save(Path(self.output).expanduser().absolute())

    def write(self, folder: Path) -> None:
        """Writes model and tokenizer into a new folder."""
        if self.model is not None:
            self.model.save_pretrained(folder, state_dict=self._whole)
            self._tokenizer.save_pretrained(folder)

    @property
    def _tokenizer(self) -> Any:
        return self.trainer.datamodule.tokenizer  # type: ignore[attr-defined]  # there if the run has one

    def _new(self) -> PreTrainedModel:
        settings: Mapping[str, Any] = self._config or {}
        kind = settings.get("model_type")
        if not isinstance(kind, str):
            raise ConfigError(
                f"model.config is {self._config!r} and model.base None: give the model_type and settings of a new "
                "model, such as {model_type: prmoe, hidden_size: 128}, or the base to train"
            )
        ids = {name: getattr(self._tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        try:
            config = AutoConfig.for_model(**{"vocab_size": len(self._tokenizer), **ids, **settings})
            new: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        except (ValueError, TypeError, KeyError, WrongTypeError) as error:
            raise ConfigError(f"model.config makes no model of type {kind!r}: {one_line(error)}") from error
        return new

    def _save(self, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=folder.parent) as part:
            whole = Path(part) / folder.name
            try:
                self.write(whole)
            except SafetensorError as error:
                raise CheckpointError(
                    f"the model cannot be written to {folder} ({one_line(error)}): free some space"
                ) from error
            self.saved = move_to_free_name(whole, folder)
        if self.saved != folder:
            log.warning("%s exists from an earlier run: the model is in %s", folder, self.saved)


class StudentTuner(ModelTuner):
    """Trains a student of a teacher by staged distillation (DeepSpeed-MoE, section 4.2).

    Logs ``lm_loss``, ``kd_loss`` and ``kd_weight`` (0: the stage is off) as well.

    Args:
        base: Directory or Hub id of the teacher.
        depth: Layers that the student keeps, evenly spread.
        keep_layers: Instead: the indices of the layers to keep.
        stop_at: First optimizer step without distillation, or a fraction of the run.
        alpha: Weight of the distillation term.
        temperature: Softens both distributions.
        schedule: ``stop``: the full weight until the stop. ``linear``: falls to zero at the stop.
        learning_rate: Step size of AdamW.
        weight_decay: Weight decay of AdamW.
        revision: Branch, tag or commit of the teacher on the Hub.
        output: Folder for the student, its tokenizer and its card; numbered if it exists. None: only checkpoints hold
            it.
        repo_id: Repository on the Hub that the card names, and to which ``swarm push`` publishes the folder.
    """

    def __init__(
        self,
        base: str,
        depth: int | None = None,
        keep_layers: list[int] | None = None,
        stop_at: int | float = 0.5,
        alpha: float = 1.0,
        temperature: float = 1.0,
        schedule: Literal["stop", "linear"] = "stop",
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        revision: str | None = None,
        output: str | None = None,
        repo_id: str | None = None,
    ) -> None:
        super().__init__(base, None, learning_rate, weight_decay, revision, output)
        self.repo_id = None if repo_id is None else check_repo_id(repo_id)
        self.depth = depth
        self.keep_layers = keep_layers
        self._teacher = base
        self._distillation = StagedDistillation(self._load_teacher, stop_at, alpha, temperature, schedule)

    def make_model(self) -> PreTrainedModel:
        """Returns the student, whose layers alone are read from the teacher's files."""
        return make_student(
            self._teacher, depth=self.depth, keep_layers=self.keep_layers, revision=self.revision, dtype=torch.float32
        )

    def configure_callbacks(self) -> list[pl.Callback]:
        """Returns the callback that adds the distillation term."""
        return [self._distillation]

    def write(self, folder: Path) -> None:
        """Writes the student, its tokenizer and its card into a new folder."""
        if self.model is not None:
            metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items() if "val" in name}
            save_student(
                self.model,
                folder,
                repo_id=self.repo_id,
                tokenizer=self._tokenizer,
                metrics=metrics,
                state_dict=self._whole,
            )

    def _load_teacher(self) -> PreTrainedModel:
        teacher: Any = self._loaded(self._teacher, "auto")
        found: PreTrainedModel = teacher.to(self.device)
        return found
