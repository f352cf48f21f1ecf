"""Finds the commit in the Hub's cache that a plain model was loaded from, by its weights.

transformers 5 forgets the commit: a model only knows its repository's name. So samples of its weights are compared with
all commits in the cache: a model just loaded from the Hub is there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

__all__ = ["cached_commit"]

log = logging.getLogger(__name__)

_MAX_SNAPSHOTS = 16
_MAX_TENSORS = 256
_MIN_TENSORS = 2
_SAMPLE_ROWS = 1


def cached_commit(model: nn.Module, repo_id: str, cache_dir: str | Path | None = None) -> str | None:
    """Returns the cached commit whose weights a model has; None if no commit can be told.

    Of several commits with the same weights, the main branch's wins, else the latest downloaded.

    Args:
        model: A model of transformers, with or without adapters in it.
        repo_id: The repository it names.
        cache_dir: The cache. None: huggingface_hub's.
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
        # The base model alone lacks the prefix that the model with a head has.
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
