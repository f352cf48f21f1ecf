"""Finds the version of a model's base, the same with and without remote blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from swarm_plugins.backbone.served import stack_of
from swarm_plugins.checkpoint import Checkpoint, block_fingerprints, layer_list_name
from swarm_plugins.checkpoint.loading import marked_base
from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.hub_errors import repo_id_fault
from swarm_plugins.model_names import is_gguf_file
from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)

_MAX_SNAPSHOTS = 16
_MAX_TENSORS = 256
_MIN_TENSORS = 2
_SAMPLE_ROWS = 1


def base_version(model: nn.Module) -> ModelVersion | None:
    """Returns the version of the base a model was loaded from; None if unknown.

    A model that this package has loaded knows it. For a plain model, samples of its tensors are compared with the
    commits in the Hub's cache, unless it comes from a directory.

    Args:
        model: A model of transformers, with or without adapters of PEFT around it.

    Raises:
        CheckpointError: If the files of its directory can no longer be read.
    """
    loaded = loaded_version(model)
    if loaded is not None:
        return loaded
    name = _name_of(model)
    if not name:
        return None
    if _is_here(name):
        return Checkpoint.open(name).version
    return _hub_version(model, name)


def loaded_version(model: nn.Module) -> ModelVersion | None:
    """Returns the version of the base of a model that this package has loaded; None for others."""
    stack = stack_of(model)
    return next(filter(None, map(marked_base, model.modules())), None) if stack is None else stack.version


def base_checkpoint(model: nn.Module, **hub: Any) -> Checkpoint | None:
    """Opens the checkpoint that a model's base was loaded from; None if that is not known.

    Args:
        model: A model of transformers, with or without adapters of PEFT around it.
        hub: Address, token and cache of the Hub, as for `Checkpoint.open`.

    Raises:
        CheckpointError: If it is not there any more, cannot be read, or holds other weights than were loaded.
    """
    if (here := _opened_here(model)) is not None:
        return here
    version = base_version(model)
    if version is None or version.is_local:
        return None
    return Checkpoint.open(version.name, revision=version.revision, **hub)


def base_layers(model: nn.Module) -> str:
    """Returns the dotted path of the list of decoder layers in the base of a model, such as ``model.layers``."""
    return layer_list_name(_base_of(model))


def base_blocks(model: nn.Module) -> tuple[str, ...]:
    """Returns the fingerprint of each block of the base's weights, in order.

    Empty for a base on the Hub, whose commit covers them: clients of a swarm never download the blocks.

    Args:
        model: A model of transformers, with or without adapters of PEFT around it.

    Raises:
        CheckpointError: If the files of its directory cannot be read, or have changed since the model was loaded.
    """
    here = _opened_here(model)
    return () if here is None else block_fingerprints(here, base_layers(model))


def _opened_here(model: nn.Module) -> Checkpoint | None:
    name, stack = _name_of(model), stack_of(model)
    if not name or not _is_here(name):
        return None
    checkpoint = Checkpoint.open(name)
    if stack is not None and checkpoint.version != stack.version:
        raise CheckpointError(f"{name} holds {checkpoint.version}, but the model was loaded as {stack.version}")
    return checkpoint


def _is_here(name: str) -> bool:
    return Path(name).is_dir() or is_gguf_file(Path(name))


def _base_of(model: nn.Module) -> nn.Module:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _name_of(model: nn.Module) -> str:
    # A model with remote blocks was not loaded by transformers, which names it in its config.
    told: Any = getattr(model, "config", None) if stack_of(model) is None else _base_of(model)
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


def cached_commit(model: nn.Module, repo_id: str, cache_dir: str | Path | None = None) -> str | None:
    """Returns the commit in the Hub's cache that a plain model was loaded from; None if unknown.

    transformers 5 forgets the commit: a model knows only its repository's name. So samples of its weights are compared
    with all commits in the cache, where a model just loaded from the Hub is found. Among commits with equal weights,
    the main branch's wins, else the latest download. ``cache_dir`` None is huggingface_hub's cache.
    """
    folder = Path(cache_dir or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type="model")
    tensors = _own_tensors(model)
    for snapshot in _snapshots(folder):
        try:
            if _has_weights_of(snapshot, tensors):
                return snapshot.name
        except (OSError, SafetensorError) as exc:
            log.debug("%s cannot be compared: %s", snapshot, exc)
    return None


def _snapshots(folder: Path) -> list[Path]:
    try:
        found = [path for path in (folder / "snapshots").iterdir() if path.is_dir()]
    except OSError:
        return []
    main = folder / "refs" / "main"
    head = main.read_text().strip() if main.is_file() else ""
    found.sort(key=lambda path: (path.name == head, path.stat().st_mtime), reverse=True)
    return found[:_MAX_SNAPSHOTS]


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the weights by their names in a checkpoint."""
    prefix = getattr(model, "base_model_prefix", "")
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        # PEFT moves what it wraps one level down.
        plain = name.replace(".base_layer.", ".")
        tensors[plain] = tensor
        # A base model alone lacks the prefix that checkpoints of the model with a head have.
        tensors.setdefault(f"{prefix}.{plain}", tensor)
    return tensors


def _has_weights_of(snapshot: Path, tensors: dict[str, Tensor]) -> bool:
    compared = 0
    for name, sample in _samples(snapshot, tensors):
        own = tensors[name].detach()[tuple(slice(0, size) for size in sample.shape)].cpu()
        if not torch.equal(sample.to(own.dtype), own):
            return False
        compared += 1
    return compared >= _MIN_TENSORS


def _samples(snapshot: Path, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    left = _MAX_TENSORS
    for file in sorted(snapshot.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                own = tensors.get(name)
                part = opened.get_slice(name)
                # Quantized, fused or offloaded weights look different here and cannot be compared.
                if own is None or own.is_meta or not own.is_floating_point() or list(own.shape) != part.get_shape():
                    continue
                if left == 0:
                    return
                left -= 1
                yield name, part[:_SAMPLE_ROWS] if own.ndim > 1 else part[:]
