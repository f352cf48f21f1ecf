"""Which version of which base a model is: the same answer for one with remote blocks and for the plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from peft import PeftModel
from torch import nn

from swarm_plugins.backbone.block import RemoteBlock
from swarm_plugins.backbone.recognition import cached_commit
from swarm_plugins.backbone.stack import RemoteStack
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.errors import ConfigError
from swarm_plugins.versions import ModelVersion

__all__ = ["ServedBlocks", "base_version", "served_blocks"]


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
    """Returns the version of the base that a model was loaded from; None if that is not known.

    A model with remote blocks knows it. For a plain one a sample of every tensor is read again: of its directory, or of
    the commits in the Hub's cache, one of which it was loaded from.

    Args:
        model: A model of transformers, with or without adapters of PEFT around it.

    Raises:
        CheckpointError: If the files of its directory cannot be read any more.
    """
    stack = _stack_of(model)
    if stack is not None:
        return stack.version
    config: Any = getattr(model, "config", None)
    name = getattr(config, "name_or_path", None) or getattr(config, "_name_or_path", None)
    if not isinstance(name, str) or not name:
        return None
    if Path(name).is_dir():
        return Checkpoint.open(name).version
    return _hub_version(model, name)


def _hub_version(model: nn.Module, name: str) -> ModelVersion | None:
    try:
        validate_repo_id(name)
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        commit = cached_commit(base, name)
        return None if commit is None else ModelVersion(name, commit)
    except (HFValidationError, ConfigError):
        return None


def served_blocks(model: nn.Module) -> list[ServedBlocks]:
    """Returns what the servers that a model has heard of say of themselves; empty for a plain model."""
    stack = _stack_of(model)
    if stack is None or stack._remote is None:
        return []
    infos = list(stack._remote.view.infos.values())
    return sorted({ServedBlocks(info.start, info.end, info.dtype, info.quantization) for info in infos})


def _stack_of(model: nn.Module) -> RemoteStack | None:
    return next((part.swarm_stack for part in model.modules() if isinstance(part, RemoteBlock)), None)
