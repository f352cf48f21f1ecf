"""Language modelling: what all tuners share, and the module of ``recipes/lora_sotu.yaml``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from peft import PeftModel
from torch import Tensor, nn

from swarm_plugins.backbone.auto import AutoSwarmModelForCausalLM
from swarm_plugins.recipes.adapter import adapter_config, put_on, save_adapter


class LanguageTuner(pl.LightningModule):
    """Common to the tuners: loss, metrics and AdamW of a causal language model, which ``configure_model`` makes.

    Args:
        base: Directory or Hub id of the model that training starts from.
        learning_rate: Step size of AdamW.
        weight_decay: Weight decay of AdamW.
        revision: Branch, tag or commit of the base on the Hub.
        output: Folder for what was trained.
    """

    def __init__(
        self, base: str | None, learning_rate: float, weight_decay: float, revision: str | None, output: str | None
    ) -> None:
        super().__init__()
        self.base = base
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.revision = revision
        self.output = output
        self.model: nn.Module | None = None
        self.saved: Path | None = None
        """Folder that was written after the run."""

    def forward(self, **batch: Tensor) -> Any:
        """Returns HF's model output, with the loss if there are labels."""
        if self.model is None:
            raise RuntimeError("the model is made in configure_model, which a Trainer calls")
        if not _takes_positions(self.model):
            batch.pop("position_ids", None)
        return self.model(**batch, use_cache=False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self(**batch).loss, prog_bar=True, batch_size=len(batch["input_ids"]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trainable, lr=self.learning_rate, weight_decay=self.weight_decay)


def _takes_positions(model: nn.Module) -> bool:
    """Returns whether a model uses the positions that it is given: PEFT makes its own for soft prompts."""
    is_prompt = isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return not is_prompt and "position_ids" in inspect.signature(base.forward).parameters


class AdapterTuner(LanguageTuner):
    """Trains an adapter of a causal language model whose blocks run on a swarm, or offloaded or in memory here.

    Args:
        base: Directory of the base model, or its id on the Hub.
        adapter: ``peft_type`` (LORA, IA3, PROMPT_TUNING, P_TUNING, PREFIX_TUNING) and settings of its PEFT config.
        learning_rate: Step size of AdamW.
        weight_decay: Weight decay of AdamW.
        revision: Branch, tag or commit of the base model on the Hub.
        output: Folder for the trained adapter in PEFT's format; numbered if it exists. None: only checkpoints hold it.
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
    ) -> None:
        super().__init__(base, learning_rate, weight_decay, revision, output)
        self._adapter = adapter_config(adapter, task_type="CAUSAL_LM")

    def configure_model(self) -> None:
        """Loads the base model where the strategy says, and adds the adapter, once."""
        if self.model is None:
            base = AutoSwarmModelForCausalLM.from_pretrained(self.base, revision=self.revision)
            self.model = put_on(base, self._adapter)

    def on_fit_end(self) -> None:
        if self.output is not None and self.model is not None:
            folder = Path(self.output).expanduser().absolute()
            self.saved = save_adapter(self.model, folder, step=self.trainer.global_step)
