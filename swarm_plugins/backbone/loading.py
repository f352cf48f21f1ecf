"""Builds HF's own class with remote blocks: only what stays on the client is read and held."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from swarm_plugins.backbone.block import make_remote
from swarm_plugins.backbone.masks import ATTENTION_NAME, register_attention
from swarm_plugins.backbone.probe import probe_layer_loop
from swarm_plugins.backbone.stack import RemoteStack
from swarm_plugins.checkpoint import Checkpoint, client_tensors, find_layers, layer_list_name
from swarm_plugins.errors import UnsupportedError

__all__ = ["load_remote", "model_class"]

log = logging.getLogger(__name__)


def model_class(mapping: Mapping[Any, Any], config: PreTrainedConfig, what: str) -> type[PreTrainedModel]:
    """Returns the class that transformers has for a config and a task.

    Raises:
        UnsupportedError: If it has none.
    """
    try:
        found = mapping[type(config)]
    except KeyError:
        raise UnsupportedError(
            f"transformers has no class of {what} for model_type {config.model_type!r}; "
            "use a decoder-only model that AutoModel can load for this task"
        ) from None
    chosen: type[PreTrainedModel] = found[0] if isinstance(found, (tuple, list)) else found
    return chosen


def load_remote(
    base_class: type[PreTrainedModel],
    checkpoint: Checkpoint,
    stack: RemoteStack,
    *,
    name: str,
    dtype: torch.dtype | str | None,
    device: str,
    config_changes: Mapping[str, Any],
) -> PreTrainedModel:
    """Returns a model of ``base_class`` whose decoder layers are remote.

    Args:
        base_class: HF's class.
        checkpoint: Where the client's share of the weights is.
        stack: Runs the blocks.
        name: The model's name as the user gave it.
        dtype: Floating type of the local weights; None or ``auto``: the checkpoint's.
        device: Where local weights and adapters live.
        config_changes: Settings that differ from the checkpoint's config (``num_labels`` ...).
    """
    config = checkpoint.config
    for name, value in config_changes.items():
        setattr(config, name, value)
    register_attention()
    with torch.device("meta"):
        path = layer_list_name(base_class(config))
    tensors = checkpoint.read(client_tensors(checkpoint, path))
    remote_class = _class_with_remote_blocks(base_class, stack, device)
    model = remote_class.from_pretrained(
        None, config=config, state_dict=tensors, dtype="auto" if dtype is None else dtype
    )
    # From here on it is HF's own class: PEFT's and transformers' tables go by class and model_type.
    model.__class__ = base_class
    model.to(torch.device(device))  # type: ignore[arg-type]  # the wrapper around it has lost its signature
    model.set_attn_implementation(ATTENTION_NAME)
    probe_layer_loop(model.base_model, stack, device)
    # As from_pretrained() sets both: PEFT, trl and model cards read the one or the other.
    model.name_or_path = model.config.name_or_path = name
    _load_generation_config(model, checkpoint)
    model.eval()
    return model


def _class_with_remote_blocks(
    base_class: type[PreTrainedModel], stack: RemoteStack, device: str
) -> type[PreTrainedModel]:
    """Makes a subclass that constructs itself with remote blocks, for the time of loading."""

    def init(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        base_class.__init__(self, config, *args, **kwargs)
        make_remote(find_layers(self), stack, device)

    # transformers looks up weight conversions by class name and capabilities by the module's source.
    names = {"__init__": init, "__module__": base_class.__module__, "__qualname__": base_class.__qualname__}
    return type(base_class.__name__, (base_class,), names)


def _load_generation_config(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    if not model.can_generate():
        return
    found = checkpoint.generation_config()
    if found is not None:
        model.generation_config = found
