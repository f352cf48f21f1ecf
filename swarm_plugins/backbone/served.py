"""What a loaded model knows of its swarm."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from swarm_plugins.backbone.decoder_layer import RemoteDecoderLayer
from swarm_plugins.errors import ConfigError

if TYPE_CHECKING:
    from swarm_plugins.backbone.stack import RemoteStack
    from swarm_plugins.client.connection import SwarmConnection


class ServedBlocks(NamedTuple):
    """The blocks a server holds, and their numeric formats."""

    start: int
    end: int
    """One past the last block."""
    dtype: str
    """Compute dtype."""
    quantization: str
    """Format of the weights: ``none``, ``int8``, ``int4`` or ``nf4``; behind it or alone ``kv-int8``, where sessions
    keep keys and values in 8 bits."""


def served_blocks(model: nn.Module) -> list[ServedBlocks]:
    """Returns the spans and formats of all servers a model has seen; empty for a plain model."""
    stack = stack_of(model)
    if stack is None or stack._remote is None:
        return []
    infos = list(stack._remote.view.infos.values())
    return sorted({ServedBlocks(info.start, info.end, info.dtype, info.quantization) for info in infos})


def swarm_connection(model: nn.Module) -> SwarmConnection:
    """Returns the connection of a model's remote blocks, which it joins the swarm by if it has not yet.

    Its ``counts`` hold what has been asked of servers so far, and at what cost.

    Args:
        model: A model, or any module around one.

    Raises:
        ConfigError: If no block of the model is remote.
        TransportError: If the swarm cannot be joined.
    """
    stack = stack_of(model)
    if stack is None:
        raise ConfigError(
            f"{type(model).__name__} has no block on a swarm: load the model with "
            "swarm_plugins.AutoSwarmModelForCausalLM.from_pretrained(name)"
        )
    return stack.remote.connection


def stack_of(model: nn.Module) -> RemoteStack | None:
    """Returns the remote blocks of a model; None if it has none."""
    return next((part.swarm_stack for part in model.modules() if isinstance(part, RemoteDecoderLayer)), None)
