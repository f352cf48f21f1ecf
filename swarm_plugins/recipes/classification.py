"""Sequence classification with soft prompts and a head: the module of ``recipes/prompt_classification.yaml``."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from swarm_plugins.backbone.auto import AutoSwarmModelForSequenceClassification
from swarm_plugins.errors import ConfigError
from swarm_plugins.recipes.adapter import adapter_config, put_on
from swarm_plugins.recipes.language import AdapterTuner


class PromptClassifier(AdapterTuner):
    """Trains a classifier: an adapter (soft prompts by default) and a head over a model on the swarm.

    Logs ``val_accuracy`` and, as a baseline, ``val_majority``: the accuracy of always answering the class that is most
    frequent in training.

    Args:
        base: Directory of the base model, or its id on the Hub.
        adapter: PEFT's settings. None: prompt tuning with 16 virtual tokens.
        learning_rate: Step size of AdamW.
        weight_decay: Weight decay of AdamW.
        revision: Branch, tag or commit of the base model on the Hub.
        output: Folder for the trained prompts and head; numbered if it exists. None: only checkpoints hold them.
        optimizer: As for `AdapterTuner`.
        lr_scheduler: As for `AdapterTuner`.
    """

    def __init__(
        self,
        base: str,
        adapter: dict[str, Any] | None = None,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.0,
        revision: str | None = None,
        output: str | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        settings = adapter or {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 16}
        super().__init__(base, settings, learning_rate, weight_decay, revision, output, optimizer, lr_scheduler)
        self._adapter = adapter_config(settings, task_type="SEQ_CLS")

    def configure_model(self) -> None:
        """Loads the base model with a new head for the classes of the data.

        Raises:
            ConfigError: If the data has no classes.
        """
        if self.model is not None:
            return
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]  # there if the run has one
        labels = list(getattr(data, "labels", ()))
        if not labels:
            raise ConfigError("the data names no classes: use swarm_plugins.recipes.LabelledData, or set .labels")
        base = AutoSwarmModelForSequenceClassification.from_pretrained(
            self.base,
            revision=self.revision,
            num_labels=len(labels),
            id2label=dict(enumerate(labels)),
            label2id={label: index for index, label in enumerate(labels)},
            pad_token_id=data.tokenizer.pad_token_id,
        )
        self.model = put_on(base, self._adapter)
        if "position_ids" in inspect.signature(base.forward).parameters:
            self.model.base_model.register_forward_pre_hook(_with_positions, with_kwargs=True)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        output = self(**batch)
        hits = (output.logits.argmax(-1) == batch["labels"]).float()  # [B]
        self.log("val_loss", output.loss, batch_size=len(hits), sync_dist=True)
        self.log("val_accuracy", hits.mean(), prog_bar=True, batch_size=len(hits), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """Logs the baseline of always answering the most frequent class."""
        share = float(self.trainer.datamodule.majority_share)  # type: ignore[attr-defined]
        self.log("val_majority", torch.tensor(share), prog_bar=True)


def _with_positions(module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Sets positions that skip left padding and follow soft prompts.

    Otherwise logits would depend on the other texts of a batch. A batch cannot bring positions itself: PEFT drops them
    with soft prompts.
    """
    if given.get("attention_mask") is None or given.get("position_ids") is not None:
        return args, given
    length = (given["input_ids"] if given.get("inputs_embeds") is None else given["inputs_embeds"]).shape[1]
    positions = (given["attention_mask"].long().cumsum(1) - 1).clamp(min=0)  # [B, prefix + L]
    return args, {**given, "position_ids": positions[:, -length:]}
