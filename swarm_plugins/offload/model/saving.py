"""Refuses to save a model with offloaded experts as a whole, and warns users who train weights that would be lost."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.offload.model.experts import OffloadedExperts

log = logging.getLogger(__name__)

_CURE = (
    "train an adapter and save that (get_peft_model(model, ...).save_pretrained; a Trainer that gets the adapted model "
    "does so by itself), or save other tensors that were trained from model.state_dict(), in a Trainer with "
    "save_strategy='no'"
)


def refuse_saving(model: PreTrainedModel, kind: type = OffloadedExperts, *, which: str = "offloaded") -> None:
    """Makes ``save_pretrained`` an error, and training the model's own weights a warning about it.

    The files would look like a model, but have no experts. ``kind`` is the class of the experts without weights,
    ``which`` names them in messages.
    """
    for module in model.modules():
        # Also the base model, which users take out of a model.
        if isinstance(module, PreTrainedModel) and any(isinstance(one, kind) for one in module.modules()):
            module.save_pretrained = partial(_refuse, which)  # type: ignore[method-assign]
    model.register_forward_pre_hook(_TrainingWarning(model, which))


def _refuse(which: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        f"a model with {which} experts is not saved as a whole, its experts stay in the checkpoint that it was loaded "
        f"from: {_CURE}"
    )


class _TrainingWarning:
    """A forward pre-hook that warns once, at the first training step. Made before the model has adapters."""

    def __init__(self, model: PreTrainedModel, which: str) -> None:
        self._which = which
        # Names: a copy of the model has parameters of its own.
        self._own = frozenset(name for name, _ in model.named_parameters())
        self._is_done = False

    def __call__(self, module: nn.Module, args: object) -> None:
        if self._is_done or not (module.training and torch.is_grad_enabled()):
            return
        self._is_done = True
        # Adapters freeze the layers they wrap.
        trained = (name.replace(".base_layer", "") for name, one in module.named_parameters() if one.requires_grad)
        if not self._own.isdisjoint(trained):
            log.warning(
                "weights of the model itself require gradients, but a model with %s experts is not saved as a "
                "whole (transformers' Trainer would end with an error at its first checkpoint): %s",
                self._which,
                _CURE,
            )
