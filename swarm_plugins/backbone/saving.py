"""Saving a model whose blocks are on servers: what would look like a checkpoint of the whole is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NoReturn

from transformers import PreTrainedModel

from swarm_plugins.errors import UnsupportedError


def save_only_what_is_here(model: PreTrainedModel) -> None:
    """Makes ``save_pretrained`` write the tensors that it is given as ``state_dict``, as Trainers do, and no others.

    Without them, and in ``push_to_hub``, it raises UnsupportedError: transformers would load the folder with blocks of
    random weights.
    """
    for module in model.modules():
        # Also the base model, which users take out of a model.
        if isinstance(module, PreTrainedModel):
            module.save_pretrained = functools.partial(_save, module)  # type: ignore[method-assign]
            module.push_to_hub = _refuse  # type: ignore[assignment]


def _save(model: PreTrainedModel, save_directory: str | Path, *args: Any, **options: Any) -> None:
    if options.get("state_dict") is None:
        _refuse()
    type(model).save_pretrained(model, save_directory, *args, **options)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        "the blocks of this model are on servers, so save_pretrained and push_to_hub cannot write all of it. Save the "
        "adapter (save_pretrained of what get_peft_model returned; 'swarm merge' makes a whole model of it and its "
        "base), or the weights that are here: save_pretrained(folder, state_dict=model.state_dict())"
    )
