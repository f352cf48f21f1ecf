"""Language modelling: what all tuners share, and the module of ``recipes/lora_sotu.yaml``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from peft import PeftModel, PeftType
from torch import Tensor, nn

from swarm_plugins.backbone.auto import AutoSwarmModelForCausalLM
from swarm_plugins.model_names import expanded
from swarm_plugins.recipes.adapter import adapter_config, put_on, save_adapter
from swarm_plugins.recipes.packing import NO_LOSS


class LanguageTuner(pl.LightningModule):
    """Common to the tuners: loss, metrics and optimizer of a causal language model, which ``configure_model`` makes.

    Args:
        base: Directory or Hub id of the model that training starts from.
        learning_rate: Step size of AdamW.
        weight_decay: Weight decay of AdamW.
        revision: Branch, tag or commit of the base on the Hub.
        output: Folder for what was trained.
        optimizer: Makes another optimizer of the trainable parameters; its settings are its own then.
        lr_scheduler: Makes a schedule of the optimizer's learning rate, by steps.
    """

    def __init__(
        self,
        base: str | None,
        learning_rate: float,
        weight_decay: float,
        revision: str | None,
        output: str | None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        self.make_optimizer = optimizer
        self.make_lr_scheduler = lr_scheduler
        self.base = base
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.revision = revision
        self.output = output
        self.model: nn.Module | None = None
        self.saved: Path | None = None
        """Folder that was written after the run."""

    @property
    def _folder(self) -> Path | None:
        """Folder for what was trained. None for trial runs, too, so that the name is left for the real one."""
        if self.output is None or self.trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by one of its connectors
            return None
        return expanded(self.output).absolute()

    def forward(self, **batch: Tensor) -> Any:
        """Returns HF's model output, with the loss if there are labels."""
        if self.model is None:
            raise RuntimeError("the model is made in configure_model, which a Trainer calls")
        if not takes_positions(self.model):
            batch.pop("position_ids", None)
        return self.model(**batch, use_cache=False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        # Weighted by the tokens that its loss is a mean of, so that the batch size does not matter.
        learned = int((batch["labels"][:, 1:] != NO_LOSS).sum())
        self.log("val_loss", self(**batch).loss, prog_bar=True, batch_size=learned, sync_dist=True)

    def configure_optimizers(self) -> Any:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.make_optimizer is None:
            optimizer: Any = torch.optim.AdamW(trainable, lr=self.learning_rate, weight_decay=self.weight_decay)
        else:
            optimizer = self.make_optimizer(trainable)
        if self.make_lr_scheduler is None:
            return optimizer
        schedule = {"scheduler": self.make_lr_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def takes_positions(model: Any, *, with_prefix: bool = False) -> bool:
    """Returns whether a model uses the positions that it is given: PEFT makes its own for soft prompts.

    Args:
        model: The model.
        with_prefix: Count models with a prefix, too: it lies in a cache, and makes no rows of packed texts.
    """
    if isinstance(model, PeftModel):
        config = model.active_peft_config
        if config.is_prompt_learning and not (with_prefix and config.peft_type == PeftType.PREFIX_TUNING):
            return False
        model = model.get_base_model()
    return "position_ids" in inspect.signature(model.forward).parameters


class AdapterTuner(LanguageTuner):
    """Trains an adapter of a causal language model whose blocks run on a swarm, or offloaded or in memory here.

    Args:
        base: Directory of the base model, or its id on the Hub.
        adapter: ``peft_type`` (LORA, IA3, PROMPT_TUNING, P_TUNING, PREFIX_TUNING) and settings of its PEFT config.
        learning_rate: Step size of AdamW.
        weight_decay: Weight decay of AdamW.
        revision: Branch, tag or commit of the base model on the Hub.
        output: Folder for the trained adapter in PEFT's format; numbered if it exists. None: only checkpoints hold it.
        optimizer: Another optimizer, by ``class_path`` and ``init_args``, instead of AdamW with the settings above.
        lr_scheduler: Schedule of the learning rate, by ``class_path`` and ``init_args``; it goes on with each step.
    """

    base: str
    model: PeftModel | None

    def __init__(
        self,
        base: str,
        adapter: dict[str, Any],
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        revision: str | None = None,
        output: str | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(base, learning_rate, weight_decay, revision, output, optimizer, lr_scheduler)
        self._adapter = adapter_config(adapter, task_type="CAUSAL_LM")

    def configure_model(self) -> None:
        """Loads the base model where the strategy says, and adds the adapter, once."""
        if self.model is None:
            base = AutoSwarmModelForCausalLM.from_pretrained(self.base, revision=self.revision)
            self.model = put_on(base, self._adapter)

    def on_fit_end(self) -> None:
        folder = self._folder
        if folder is not None and self.model is not None and self.trainer.is_global_zero:
            self.saved = save_adapter(self.model, folder, step=self.trainer.global_step)
