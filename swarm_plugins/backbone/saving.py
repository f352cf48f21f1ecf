"""Saving a model whose blocks are on servers: what would look like a checkpoint of the whole is refused."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from transformers import PreTrainedModel

from swarm_plugins.errors import UnsupportedError


def save_only_what_is_here(model: PreTrainedModel) -> None:
    """Makes ``save_pretrained`` write the tensors that it is given as ``state_dict``, as Trainers do, and no others.

    Without them, and in ``push_to_hub``, it raises UnsupportedError: transformers would load the folder with blocks of
    random weights. Of a model with an adapter of ``add_adapter`` or ``load_adapter``, both write the adapter alone.
    """
    for module in model.modules():
        # Also the base model, which users take out of a model.
        if isinstance(module, PreTrainedModel):
            module.save_pretrained = functools.partial(_save, module, "save_pretrained")  # type: ignore[method-assign]
            module.push_to_hub = functools.partial(_save, module, "push_to_hub")  # type: ignore[assignment]


def _save(model: PreTrainedModel, name: str, *args: Any, **options: Any) -> Any:
    method = getattr(type(model), name)
    given = inspect.signature(method).bind(model, *args, **options).arguments
    if given.get("state_dict") is None and not model._hf_peft_config_loaded:
        raise UnsupportedError(
            "the blocks of this model are on servers, so save_pretrained and push_to_hub cannot write all of it. Save "
            "the adapter (save_pretrained of what get_peft_model returned; 'swarm merge' makes a whole model of it and "
            "its base), or the weights that are here: save_pretrained(folder, state_dict=model.state_dict())"
        )
    return method(model, *args, **options)
