"""A model with offloaded experts is not saved as a whole; who trains what would be lost is told at the first step."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.offload.model.experts import OffloadedExperts

__all__ = ["refuse_saving"]

log = logging.getLogger(__name__)

_CURE = (
    "train an adapter and save that (get_peft_model(model, ...).save_pretrained; a Trainer that gets the adapted model "
    "does so by itself), or save other tensors that were trained from model.state_dict(), in a Trainer with "
    "save_strategy='no'"
)


def refuse_saving(model: PreTrainedModel) -> None:
    """Makes ``save_pretrained`` an error, and training of the model's own weights a warning of that.

    What would be written looks like a model, but has no experts.

    Args:
        model: With offloaded experts; also its base model is not saved.
    """
    for module in model.modules():
        # Also the base model, which users take out of a model.
        if isinstance(module, PreTrainedModel) and any(isinstance(one, OffloadedExperts) for one in module.modules()):
            module.save_pretrained = _refuse  # type: ignore[method-assign]
    model.register_forward_pre_hook(_TrainingWarning(model))


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        "a model with offloaded experts is not saved as a whole, its experts stay in the checkpoint that it was loaded "
        f"from: {_CURE}"
    )


class _TrainingWarning:
    """Says once, at the first training step, that what is trained will not be saved with the model: a forward pre-hook.

    Args:
        model: Before adapters are on it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        # Names: a copy of the model has parameters of its own.
        self._own = frozenset(name for name, _ in model.named_parameters())
        self._is_said = False

    def __call__(self, module: nn.Module, args: object) -> None:
        if self._is_said or not (module.training and torch.is_grad_enabled()):
            return
        # Adapters freeze what they are put on.
        trained = (name.replace(".base_layer", "") for name, one in module.named_parameters() if one.requires_grad)
        self._is_said = True
        if not self._own.isdisjoint(trained):
            log.warning(
                "weights of the model itself require gradients, but a model with offloaded experts is not saved as a "
                "whole (transformers' Trainer would end with an error at its first checkpoint): %s",
                _CURE,
            )
