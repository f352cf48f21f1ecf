"""Writes a merged model as a folder for transformers, vLLM and others: the base's shards, tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from swarm_plugins.checkpoint.files import check_inside
from swarm_plugins.checkpoint.headers import dtype_name
from swarm_plugins.checkpoint.index import INDEX_FILE, SINGLE_FILE
from swarm_plugins.errors import CheckpointError, one_line
from swarm_plugins.hub.folder import files_beside_weights
from swarm_plugins.merging.base import Planned
from swarm_plugins.merging.merged import MergedModel
from swarm_plugins.merging.places import new_place

_CONFIG_FILE = "config.json"
_ALIGNMENT = 8


def write_folder(model: MergedModel, out: Path, dtype: torch.dtype | None) -> None:
    """Writes a folder with the weights, the config, and the files of the tokenizer and the license.

    Args:
        model: The merged model.
        out: The folder, which must not exist.
        dtype: Floating type that the config names. None: the base's.

    Raises:
        ConfigError: If ``out`` exists.
        CapacityError: If the disk has no room for it.
        CheckpointError: If the base cannot be read, or the result is not finite.
        OSError: If it cannot be written; nothing is left behind.
    """
    files: dict[str, dict[str, Planned]] = {}
    for name, planned in model.tensors.items():
        files.setdefault(planned.file, {})[name] = planned
    if len(files) == 1:
        files = {SINGLE_FILE: next(iter(files.values()))}
    config = _config(model, dtype)  # first: it may be missing
    total = sum(planned.num_bytes for planned in model.tensors.values())
    with new_place(out, total) as folder:
        folder.mkdir()
        for file, tensors in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            _write_shard(model, folder / file, tensors)
        if len(files) > 1:
            weight_map = {name: file for file, tensors in files.items() for name in tensors}
            _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _write_json(folder / _CONFIG_FILE, config)
        for name in files_beside_weights(model.checkpoint.file_names()):
            source = model.checkpoint.file_path(name)
            check_inside(source, source.parent.resolve())
            shutil.copyfile(source, folder / name)


def _write_shard(model: MergedModel, path: Path, tensors: Mapping[str, Planned]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, planned in tensors.items():
        start, end = end, end + planned.num_bytes
        header[name] = {"dtype": dtype_name(planned.dtype), "shape": planned.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, planned in tensors.items():
            tensor = model.read(name)
            if (tuple(tensor.shape), tensor.dtype) != (planned.shape, planned.dtype):
                raise CheckpointError(
                    f"{name} became {list(tensor.shape)} of {tensor.dtype}, expected {list(planned.shape)} of "
                    f"{planned.dtype}: the adapter changes its size, which cannot be merged"
                )
            stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _config(model: MergedModel, dtype: torch.dtype | None) -> dict[str, Any]:
    """Returns the base's config without its packing, with another type if one was given."""
    path = model.checkpoint.file_path(_CONFIG_FILE)
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as exc:
        raise CheckpointError(f"{path} is not JSON ({one_line(exc)}): fetch the base again") from exc
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for part in parts:
        part.pop("quantization_config", None)
        if model.is_untied and (part is config or "tie_word_embeddings" in part):
            part["tie_word_embeddings"] = False
        for key in ("dtype", "torch_dtype"):
            if dtype is not None and key in part:
                part[key] = str(dtype).removeprefix("torch.")
    if dtype is not None and "torch_dtype" not in config:
        config["dtype"] = str(dtype).removeprefix("torch.")
    return config


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
