"""Which blocks of a model may run here, with the others on servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache, PreTrainedModel

from swarm_plugins.checkpoint.ties import parted
from swarm_plugins.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from swarm_plugins.backbone.stack import RemoteStack


def check_local_blocks(local: tuple[int, int], num_blocks: int, name: str) -> None:
    """Raises ConfigError if no block of a model would be remote."""
    if sum(local) >= num_blocks:
        raise ConfigError(
            f"local_blocks={local} covers all {num_blocks} blocks of {name}: leave at least one to the swarm, or load "
            "the model with transformers"
        )


def check_apart(outline: PreTrainedModel, path: str, stack: RemoteStack) -> None:
    """Raises UnsupportedError if a block here shares weights with one on servers, where they are not trained."""
    for there, here in parted(outline, path, stack.blocks):
        raise UnsupportedError(
            f"local_blocks={stack.local_blocks} cannot work with {type(outline).__name__}: block {here}, which would "
            f"run here, shares weights with block {there}: leave both to servers, or run both here"
        )


def check_caches(decoder: PreTrainedModel, stack: RemoteStack) -> None:
    """Raises UnsupportedError if local blocks would not find in a cache what they use, with others on servers."""
    what = f"local_blocks={stack.local_blocks} cannot work with {type(decoder).__name__}"
    before, behind = stack.local_blocks
    if stack.columns.gathered and (before or behind):
        raise UnsupportedError(
            f"{what}, which makes arguments of later layers of what earlier ones get: leave all blocks to servers "
            "(local_blocks=(0, 0))"
        )
    if before and getattr(decoder.config, "num_hidden_layers", stack.num_blocks) != stack.num_blocks:
        raise UnsupportedError(
            f"{what}, whose layers keep several keys and values each: leave the first blocks to servers "
            f"(local_blocks=(0, {behind}))"
        )
    if not behind:
        return
    cache = DynamicCache(config=decoder.config)
    with torch.no_grad(), stack.noting():
        decoder(input_ids=torch.zeros(1, 1, dtype=torch.long, device=decoder.device), past_key_values=cache)
    for block, layer in enumerate(cache.layers):
        # The positions of all tokens, for later layers (Qwen 4).
        if block in stack.blocks and getattr(layer, "indexer_position_ids", None) is not None:
            raise UnsupportedError(
                f"{what}, which keeps positions for later layers with block {block}: run that one here too "
                f"(local_blocks=({block + 1}, {behind})), or leave the last blocks to servers "
                f"(local_blocks=({before}, 0))"
            )
