"""The version of a model's base: the same answer with remote blocks and without."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from peft import PeftModel
from torch import nn

from swarm_plugins.backbone.decoder_layer import RemoteDecoderLayer
from swarm_plugins.backbone.recognition import cached_commit
from swarm_plugins.checkpoint import Checkpoint, block_fingerprints, layer_list_name
from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.hub_errors import repo_id_fault
from swarm_plugins.versions import ModelVersion

if TYPE_CHECKING:
    from swarm_plugins.backbone.stack import RemoteStack

__all__ = ["ServedBlocks", "base_blocks", "base_version", "served_blocks"]


class ServedBlocks(NamedTuple):
    """How a server holds blocks of a model."""

    start: int
    """First block."""
    end: int
    """One after the last block."""
    dtype: str
    """What it computes in."""
    quantization: str
    """How it holds the weights: ``none``, ``int8``, ``nf4``."""


def base_version(model: nn.Module) -> ModelVersion | None:
    """Returns the version of the base a model was loaded from; None if unknown.

    A model with remote blocks knows it. For a plain one samples of its tensors are compared with its directory, or with
    the commits in the Hub's cache.

    Args:
        model: A model of transformers, with or without adapters of PEFT around it.

    Raises:
        CheckpointError: If the files of its directory can no longer be read.
    """
    stack = _stack_of(model)
    if stack is not None:
        return stack.version
    name = _name_of(model)
    if not name:
        return None
    if Path(name).is_dir():
        return Checkpoint.open(name).version
    return _hub_version(model, name)


def base_blocks(model: nn.Module) -> tuple[str, ...]:
    """Returns the fingerprint of each block of the base's weights, in order.

    Empty for a base on the Hub, whose commit covers them: a client of a swarm has no byte of the blocks.

    Args:
        model: A model of transformers, with or without adapters of PEFT around it.

    Raises:
        CheckpointError: If the files of its directory cannot be read, or have changed since the model was loaded.
    """
    name = _name_of(model)
    if not name or not Path(name).is_dir():
        return ()
    checkpoint = Checkpoint.open(name)
    stack = _stack_of(model)
    if stack is not None and checkpoint.version != stack.version:
        raise CheckpointError(f"{name} holds {checkpoint.version}, but the model was loaded as {stack.version}")
    return block_fingerprints(checkpoint, layer_list_name(_base_of(model)))


def _base_of(model: nn.Module) -> nn.Module:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _name_of(model: nn.Module) -> str:
    # A model with remote blocks was not loaded by transformers, which names it in its config.
    told: Any = getattr(model, "config", None) if _stack_of(model) is None else _base_of(model)
    name = getattr(told, "name_or_path", None) or getattr(told, "_name_or_path", None)
    return name if isinstance(name, str) else ""


def _hub_version(model: nn.Module, name: str) -> ModelVersion | None:
    if repo_id_fault(name) is not None:
        return None
    commit = cached_commit(_base_of(model), name)
    try:
        return None if commit is None else ModelVersion(name, commit)
    except ConfigError:
        return None


def served_blocks(model: nn.Module) -> list[ServedBlocks]:
    """Returns how the servers a model has seen hold their blocks; empty for a plain model."""
    stack = _stack_of(model)
    if stack is None or stack._remote is None:
        return []
    infos = list(stack._remote.view.infos.values())
    return sorted({ServedBlocks(info.start, info.end, info.dtype, info.quantization) for info in infos})


def _stack_of(model: nn.Module) -> RemoteStack | None:
    return next((part.swarm_stack for part in model.modules() if isinstance(part, RemoteDecoderLayer)), None)
