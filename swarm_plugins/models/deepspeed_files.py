"""Reads the files of a checkpoint that DeepSpeed's engine wrote for a model with MoE layers.

``mp_rank_00_model_states.pt`` holds everything but experts, ``layer_M_expert_E_mp_rank_00_model_states.pt`` one expert
each; M counts layers with experts. Files may come from anyone: nothing is unpickled but tensors, plain containers and
`argparse.Namespace`, tensors stay on the disk until they are used, and none may claim more bytes than its file has.
"""

from __future__ import annotations

import argparse
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError, one_line

_REST = "mp_rank_00_model_states.pt"
_EXPERT_FILE = re.compile(r"layer_(\d{1,6})_expert_(\d{1,6})_mp_rank_(\d{1,4})_model_states\.pt")
_PICKLE_BYTES = 64 << 20
"""Largest description of tensors in a file: 100 times that of the largest models."""
_TAG_CHARS = 200
_DEPTH = 12


@dataclass(frozen=True, kw_only=True)
class DeepSpeedStates:
    """Tensors of a checkpoint by full name, and what the training program stored with them."""

    folder: Path
    tensors: Mapping[str, Tensor]
    arguments: Mapping[str, bool | int | float]
    """Numbers and switches of Megatron's command line, empty if there is none."""
    version: float | None
    """Megatron's ``checkpoint_version``."""


def read_states(directory: str | Path, tag: str | None = None) -> DeepSpeedStates:
    """Opens a checkpoint; tensors are mapped, not read.

    Args:
        directory: The folder given to DeepSpeed's ``save_checkpoint``, or the one of a tag in it.
        tag: Name of a folder in it; None: the one that ``latest`` names.

    Raises:
        ConfigError: If there is no such folder.
        CheckpointError: If a file is missing, damaged, or holds anything but tensors and plain values.
        UnsupportedError: If the model is split over tensor-parallel ranks.
    """
    folder = _tagged(Path(directory), tag)
    ranks = sorted(file.name for file in folder.glob("mp_rank_*_model_states.pt"))
    if ranks != [_REST]:
        raise UnsupportedError(
            f"{folder} holds the parts of {len(ranks)} tensor-parallel ranks ({', '.join(ranks[:3])}, ..): merge them "
            "with Megatron-DeepSpeed's tools first"
        )
    state = _load(folder / _REST)
    module = state.get("module")
    if not isinstance(module, Mapping):
        raise CheckpointError(
            f"{folder / _REST} has no model under 'module' (keys {', '.join(map(str, list(state)[:5]))}): expected "
            "what DeepSpeed's save_checkpoint writes"
        )
    tensors: dict[str, Tensor] = {}
    _flatten(module, "", tensors, folder / _REST)
    for file in sorted(folder.iterdir()):
        if _EXPERT_FILE.fullmatch(file.name):
            _flatten(_load(file), "", tensors, file)
    given = state.get("args")
    version = state.get("checkpoint_version")
    return DeepSpeedStates(
        folder=folder,
        tensors=tensors,
        arguments=_plain(vars(given)) if isinstance(given, argparse.Namespace) else {},
        version=float(version) if isinstance(version, int | float) else None,
    )


def _plain(arguments: Mapping[str, Any]) -> dict[str, bool | int | float]:
    return {name: value for name, value in arguments.items() if isinstance(value, bool | int | float)}


def _tagged(directory: Path, tag: str | None) -> Path:
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory: give the one that DeepSpeed's save_checkpoint wrote to")
    if tag is None and (directory / _REST).is_file():
        return directory
    latest = directory / "latest"
    if tag is None:
        if not latest.is_file():
            raise ConfigError(f"{directory} has neither {_REST} nor a file 'latest': give the tag of the checkpoint")
        with latest.open(encoding="utf-8", errors="replace") as file:
            tag = file.read(_TAG_CHARS).strip()
    if not tag or tag in (".", "..") or Path(tag).name != tag:
        raise ConfigError(f"invalid tag {tag!r}: expected the name of a folder in {directory}")
    if not (directory / tag / _REST).is_file():
        raise ConfigError(f"{directory / tag} has no {_REST}: expected a checkpoint that DeepSpeed wrote")
    return directory / tag


def _load(file: Path) -> dict[Any, Any]:
    """Loads a file without running anything in it."""
    try:
        with zipfile.ZipFile(file) as archive:
            described = sum(one.file_size for one in archive.infolist() if one.filename.endswith(".pkl"))
        if described > _PICKLE_BYTES:
            raise CheckpointError(
                f"{file} describes its tensors in {described} bytes, at most {_PICKLE_BYTES} are read: fetch it again"
            )
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except zipfile.BadZipFile as exc:
        raise CheckpointError(
            f"{file} is damaged, or written by torch before 1.6: fetch it again, or save it with a newer torch"
        ) from exc
    except pickle.UnpicklingError as exc:
        found = re.search(r"GLOBAL ([\w.]+)", str(exc))
        what = f"objects of {found[1]}" if found else one_line(exc)
        raise CheckpointError(
            f"{file} holds more than tensors and plain values ({what}), which could run code: where you trust it, save "
            "{'module': state['module']} of it to a file of the same name, and give the settings as arguments"
        ) from exc
    except CheckpointError:
        raise
    except Exception as exc:  # of any kind: torch follows what a damaged file says
        raise CheckpointError(f"{file} cannot be read ({one_line(exc, with_kind=True)}): fetch it again") from exc
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} holds a {type(state).__name__}, expected a dictionary of tensors")
    return state


def _flatten(state: Mapping[Any, Any], prefix: str, into: dict[str, Tensor], file: Path) -> None:
    """Collects the tensors of nested dictionaries under joined names, and checks their sizes against the file's."""
    pending: list[tuple[Mapping[Any, Any], str, int]] = [(state, prefix, 0)]
    num_bytes, limit = 0, file.stat().st_size
    while pending:
        level, before, depth = pending.pop()
        for key, value in level.items():
            name = f"{before}{key}"
            if isinstance(value, Tensor):
                num_bytes += value.numel() * value.element_size()
                if name in into or value.layout != torch.strided or num_bytes > 2 * limit:
                    raise CheckpointError(
                        f"{file} has an unusable tensor {name!r} of shape {list(value.shape)} (stored twice, sparse, "
                        f"or larger than the file's {limit} bytes): fetch it again"
                    )
                into[name] = value
            elif isinstance(value, Mapping) and depth < _DEPTH:
                pending.append((value, f"{name}.", depth + 1))
