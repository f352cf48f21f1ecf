"""Builds HF's own model class with remote blocks; reads and holds only the client's share of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from swarm_plugins.backbone.attention import refuse_continuous_batching, register_attention
from swarm_plugins.backbone.decoder_layer import make_remote
from swarm_plugins.backbone.local_blocks import keep_attention, local_tensors
from swarm_plugins.backbone.probe import probe_layer_loop
from swarm_plugins.checkpoint import (
    Checkpoint,
    client_tensors,
    find_layers,
    layer_list_name,
    model_from_tensors,
)
from swarm_plugins.checkpoint.loading import take_generation_config

if TYPE_CHECKING:
    from swarm_plugins.backbone.stack import RemoteStack

_SHARE = "the part that runs here: servers hold the blocks"
_LOCAL = " except local_blocks"


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
    """Returns a model of HF's ``base_class`` whose decoder layers are remote; see ``from_pretrained``.

    Raises:
        CheckpointError: If a tensor cannot be read or has a wrong shape.
    """
    config = checkpoint.config
    for setting, value in config_changes.items():
        setattr(config, setting, value)
    with torch.device("meta"):
        path = layer_list_name(base_class(config))
    local = local_tensors(checkpoint, path, stack.blocks)
    model = model_from_tensors(
        base_class,
        config,
        checkpoint.read([*client_tensors(checkpoint, path), *local], what=_SHARE + (_LOCAL if local else "")),
        "auto" if dtype is None else dtype,
        name,
        trim=lambda model: make_remote(find_layers(model), stack, device),
        may_lack=lambda weight: not weight.startswith(f"{path}."),
    )
    model.to(torch.device(device))  # type: ignore[arg-type]  # its wrapper lacks the signature
    attention = keep_attention(model, find_layers(model), stack.blocks) if local else None
    model.set_attn_implementation(register_attention(attention))
    model.init_continuous_batching = refuse_continuous_batching  # type: ignore[assignment]
    probe_layer_loop(model.base_model, stack, device)
    take_generation_config(model, checkpoint)
    return model
