"""Training of whole models: the modules of ``recipes/prmoe.yaml`` and ``recipes/mos.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from swarm_plugins.callbacks.distill_lightning import StagedDistillation
from swarm_plugins.distill import make_student
from swarm_plugins.distill.pair import load_language_model
from swarm_plugins.errors import ConfigError, one_line
from swarm_plugins.hub import save_student
from swarm_plugins.hub.names import check_repo_id
from swarm_plugins.hub_errors import WrongTypeError, repo_id_fault
from swarm_plugins.model_names import expanded
from swarm_plugins.recipes.adapter import save_whole
from swarm_plugins.recipes.language import LanguageTuner


class ModelTuner(LanguageTuner):
    """Trains all weights of a causal language model: a new one, or one that exists.

    Args:
        base: Directory or Hub id of the model to train. None: a new one.
        config: Settings of a new model, with its ``model_type``. The size of the vocabulary is the tokenizer's.
        learning_rate: Step size of AdamW.
        weight_decay: Weight decay of AdamW.
        revision: Branch, tag or commit of the base on the Hub.
        output: Folder for the model and its tokenizer; numbered if it exists. None: only checkpoints hold them.
        optimizer: As for `AdapterTuner`.
        lr_scheduler: As for `AdapterTuner`.
    """

    model: PreTrainedModel | None

    def __init__(
        self,
        base: str | None = None,
        config: dict[str, Any] | None = None,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        revision: str | None = None,
        output: str | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(base, learning_rate, weight_decay, revision, output, optimizer, lr_scheduler)
        self._config = config
        self._whole: dict[str, Any] = {}

    def make_model(self) -> PreTrainedModel:
        """Returns the model to train, in float32: AdamW's small steps get lost in the rounding of half precision.

        Raises:
            ConfigError: If the base does not exist, or a setting of the new model is wrong.
        """
        if self.base is None:
            return self._new()
        return load_language_model("base", self.base, revision=self.revision, dtype=torch.float32)

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.make_model().train()

    def on_fit_end(self) -> None:
        folder = self._folder
        if folder is not None and self.model is not None:
            # On every rank: a strategy may have divided the weights.
            whole = self.trainer.strategy.lightning_module_state_dict()
            self._whole = {name.removeprefix("model."): value for name, value in whole.items()}
            if self.trainer.is_global_zero:
                self.saved = save_whole(folder, "the model", self.write)

    def write(self, folder: Path) -> None:
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
        if ids["pad_token_id"] == ids["eos_token_id"]:
            ids["pad_token_id"] = None  # the embedding of a token to pad with is not trained
        try:
            config = AutoConfig.for_model(**{"vocab_size": len(self._tokenizer), **ids, **settings})
            new: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        except (ValueError, TypeError, KeyError, WrongTypeError) as error:
            raise ConfigError(f"model.config makes no model of type {kind!r}: {one_line(error)}") from error
        return new


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
        optimizer: As for `AdapterTuner`.
        lr_scheduler: As for `AdapterTuner`.
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
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(base, None, learning_rate, weight_decay, revision, output, optimizer, lr_scheduler)
        self.repo_id = None if repo_id is None else check_repo_id(repo_id)
        self.depth = depth
        self.keep_layers = keep_layers
        self._teacher = base
        self._distillation = StagedDistillation(self._load_teacher, stop_at, alpha, temperature, schedule)

    def prepare_data(self) -> None:
        """Checks, before anything is loaded, that the teacher can exist.

        Raises:
            ConfigError: If it is neither a directory nor a possible id on the Hub.
        """
        if repo_id_fault(self._teacher) is not None and not expanded(self._teacher).is_dir():
            raise ConfigError(
                f"there is no directory {self._teacher!r} with a teacher: 'swarm fit --config recipes/prmoe.yaml' "
                "trains the one of recipes/mos.yaml; or give the directory or Hub id of another as model.base"
            )

    def make_model(self) -> PreTrainedModel:
        """Returns the student, whose layers alone are read from the teacher's files."""
        return make_student(
            self._teacher, depth=self.depth, keep_layers=self.keep_layers, revision=self.revision, dtype=torch.float32
        )

    def configure_callbacks(self) -> list[pl.Callback]:
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
        teacher: Any = load_language_model("teacher", self._teacher, revision=self.revision, dtype="auto")
        found: PreTrainedModel = teacher.to(self.device)
        return found
