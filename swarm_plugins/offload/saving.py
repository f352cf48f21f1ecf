"""A model with offloaded experts is not saved as a whole; a training run that would end so does not begin."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from swarm_plugins.errors import UnsupportedError
from swarm_plugins.offload.standin import OffloadedExperts

__all__ = ["refuse_saving"]

_TRAINER_MODULE = "transformers.trainer"
_MAX_FRAMES = 100


def refuse_saving(model: PreTrainedModel) -> None:
    """Makes ``save_pretrained`` an error, and a run of transformers' ``Trainer`` that would call it one at its start.

    What would be written looks like a model, but has no experts.

    Args:
        model: With offloaded experts; also its base model is not saved.
    """
    for module in model.modules():
        # Also the base model, which users take out of a model.
        if isinstance(module, PreTrainedModel) and any(isinstance(one, OffloadedExperts) for one in module.modules()):
            module.save_pretrained = _refuse  # type: ignore[method-assign]
    model.register_forward_pre_hook(_check_trainer)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        "a model with offloaded experts is not saved as a whole, its experts stay in the checkpoint that it was loaded "
        "from: train an adapter and save that (get_peft_model(model, ...).save_pretrained; a Trainer that gets the "
        "adapted model does so by itself), or save other tensors that were trained from model.state_dict(), in a "
        "Trainer with save_strategy='no'"
    )


def _check_trainer(module: nn.Module, args: object) -> None:
    """Refuses the first step of a Trainer whose first checkpoint would be refused, hours later."""
    if not (module.training and torch.is_grad_enabled()):
        return
    trainer = _trainer_of(sys._getframe(1))
    # Around an adapted model, or with a way to save of its own, it may.
    if trainer is None or trainer.model is not module or trainer.args.save_strategy == "no":
        return
    plain = sys.modules[_TRAINER_MODULE].Trainer
    if all(getattr(type(trainer), name) is getattr(plain, name) for name in ("save_model", "_save")):
        _refuse()


def _trainer_of(frame: FrameType | None) -> Any:
    """Returns the Trainer whose step a call is part of; it tells the model nothing of itself beforehand."""
    known: Any = sys.modules.get(_TRAINER_MODULE)
    for _ in range(_MAX_FRAMES):
        if known is None or frame is None:
            break
        # Only its own frames are looked into: their tensors would live longer otherwise.
        owner = frame.f_locals.get("self") if frame.f_code.co_filename == known.__file__ else None
        if isinstance(owner, known.Trainer):
            return owner
        frame = frame.f_back
    return None
