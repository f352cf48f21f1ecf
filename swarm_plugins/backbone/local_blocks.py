"""Blocks at both ends of a model that run here, so that servers see neither first nor last hidden states.

They are HF's own layers with real weights. They need the masks of an attention implementation of their own, while
remote blocks need the plain padding mask; see `register_attention`.
"""

from __future__ import annotations

import copy

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from swarm_plugins.checkpoint import Checkpoint, block_tensors
from swarm_plugins.errors import ConfigError


def check_local_blocks(local: tuple[int, int], num_blocks: int, name: str) -> None:
    """Raises ConfigError if no block of a model would be remote."""
    if sum(local) >= num_blocks:
        raise ConfigError(
            f"local_blocks={local} covers all {num_blocks} blocks of {name}: leave at least one to the swarm, or load "
            "the model with transformers"
        )


def local_tensors(checkpoint: Checkpoint, layer_path: str, remote: range) -> list[str]:
    """Returns the checkpoint's names of the tensors of all blocks outside ``remote``.

    Raises:
        CheckpointError: If a block has no tensor.
    """
    num_blocks = int(checkpoint.config.get_text_config(decoder=True).num_hidden_layers)
    parts = (range(remote.start), range(remote.stop, num_blocks))
    return [name for part in parts if part for name in block_tensors(checkpoint, layer_path, part)]


def keep_attention(model: PreTrainedModel, layers: nn.ModuleList, remote: range) -> str:
    """Gives local layers a config of their own that keeps the model's attention; returns its name."""
    attention: str = model.config._attn_implementation
    is_default = model.config._experts_implementation == "grouped_mm"
    if is_default and model.device.type == "cpu" and model._can_set_experts_implementation():
        model.set_experts_implementation("swarm_table")  # as on servers: the same bits, and faster there
    copies: dict[int, PreTrainedConfig] = {}
    for index, layer in enumerate(layers):
        for module in layer.modules() if index not in remote else ():
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                module.config = copies.setdefault(id(config), copy.deepcopy(config))  # type: ignore[assignment]
    return attention
