"""Reads the files of a checkpoint that DeepSpeed's engine wrote for a model with MoE layers.

``mp_rank_00_model_states.pt`` holds everything but experts, ``layer_M_expert_E_mp_rank_00_model_states.pt`` one expert
each; M counts layers with experts. Files may come from anyone: nothing is unpickled but tensors, plain containers and
`argparse.Namespace`, tensors stay on the disk until they are used, and none may claim more bytes than its file has.
"""

from __future__ import annotations

import argparse
import math
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarm_plugins.checkpoint.files import check_inside
from swarm_plugins.errors import CheckpointError, ConfigError, UnsupportedError, one_line

_REST = "mp_rank_00_model_states.pt"
_EXPERT_FILE = re.compile(r"layer_(\d{1,6})_expert_(\d{1,6})_mp_rank_(\d{1,4})_model_states\.pt")
_PICKLE_BYTES = 64 << 20
"""Largest description of tensors in a file: 100 times that of the largest models."""
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_TAG_CHARS = 200
# Of the nested dictionaries in a file: dictionaries that contain each other several times would never end.
_DEPTH = 12
_KEY_CHARS = 200
_MOST_ENTRIES = 200_000
# Of the numbers on a command line; longer integers cannot even be shown in a message.
_MOST = 1 << 53


@dataclass(frozen=True, kw_only=True)
class DeepSpeedStates:
    """Tensors of a checkpoint by full name, and what the training program stored with them."""

    folder: Path
    tensors: Mapping[str, Tensor]
    files: Mapping[str, Path]
    """The file of each tensor."""
    arguments: Mapping[str, bool | int | float]
    """Numbers and switches of Megatron's command line, empty if there is none."""
    version: float | None
    """Megatron's ``checkpoint_version``."""

    def checked(self, name: str) -> Tensor:
        """Returns a tensor after reading it once.

        Raises:
            CheckpointError: If it does not hold finite numbers.
        """
        tensor, file = self.tensors[name], self.files[name]
        if tensor.dtype not in _DTYPES or not tensor.numel():
            raise CheckpointError(
                f"{name} in {file} is {tensor.dtype} of shape {list(tensor.shape)}: expected numbers in float32, "
                "float64, bfloat16 or float16; save the model in one of them"
            )
        if not bool(torch.stack(tensor.aminmax()).isfinite().all()):
            raise CheckpointError(
                f"{name} in {file} has NaN or infinite numbers: the training had diverged; take an earlier checkpoint"
            )
        return tensor


def read_states(directory: str | Path, tag: str | None = None) -> DeepSpeedStates:
    """Opens a checkpoint; tensors are mapped, not read.

    Args:
        directory: The folder given to DeepSpeed's ``save_checkpoint``, or the one of a tag in it.
        tag: Name of a folder in it; None: the one that ``latest`` names.

    Raises:
        ConfigError: If there is no such folder.
        CheckpointError: If a file is missing, damaged, linked from elsewhere, or holds anything but tensors and plain
            values.
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
        keys = [key[:_KEY_CHARS] for key in state if isinstance(key, str)]
        raise CheckpointError(
            f"{folder / _REST} has no model under 'module' (keys {', '.join(keys[:5])}): expected what DeepSpeed's "
            "save_checkpoint writes"
        )
    tensors: dict[str, Tensor] = {}
    files: dict[str, Path] = {}
    experts = (file for file in sorted(folder.iterdir()) if _EXPERT_FILE.fullmatch(file.name))
    for file in (folder / _REST, *experts):
        for name, tensor in _flattened(module if file.name == _REST else _load(file), file):
            if name in files:
                raise CheckpointError(
                    f"{name} is in {files[name].name} and in {file}: fetch both again, under their own names"
                )
            tensors[name], files[name] = tensor, file
    given = state.get("args")
    arguments = _plain(vars(given)) if isinstance(given, argparse.Namespace) else {}
    version = _plain({"version": state.get("checkpoint_version")}).get("version")
    return DeepSpeedStates(folder=folder, tensors=tensors, files=files, arguments=arguments, version=version)


def _plain(arguments: Mapping[Any, Any]) -> dict[str, bool | int | float]:
    return {
        name: value
        for name, value in arguments.items()
        if isinstance(name, str)
        and isinstance(value, bool | int | float)
        and (abs(value) <= _MOST if isinstance(value, int) else math.isfinite(value))
    }


def _tagged(directory: Path, tag: str | None) -> Path:
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory: give the one that DeepSpeed's save_checkpoint wrote to")
    if tag is None and (directory / _REST).is_file():
        return directory
    latest = directory / "latest"
    if tag is None:
        if not latest.is_file():
            raise ConfigError(
                f"{directory} has neither {_REST} nor a file 'latest' ({_found(directory)}): give the tag of the "
                "checkpoint, if one of them is its folder; models of transformers need no conversion"
            )
        with latest.open(encoding="utf-8", errors="replace") as file:
            tag = file.read(_TAG_CHARS).strip()
    if not tag or tag in (".", "..") or Path(tag).name != tag:
        raise ConfigError(f"invalid tag {tag!r}: expected the name of a folder in {directory}")
    if not (directory / tag / _REST).is_file():
        raise ConfigError(
            f"{directory / tag} has no {_REST} ({_found(directory / tag)}): expected what DeepSpeed's save_checkpoint "
            "writes with ZeRO up to stage 2 and without pipeline parallelism"
        )
    return directory / tag


def _found(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return f"it holds {', '.join(names[:3])}{', ..' if len(names) > 3 else ''}" if names else "it holds nothing"


def _load(file: Path) -> dict[Any, Any]:
    """Loads a file without running anything in it."""
    # Opening a pipe would wait for ever.
    if not file.is_file():
        raise CheckpointError(f"{file} is not a regular file: put the file itself in its place")
    check_inside(file, file.parent.resolve())
    try:
        _check_archive(file)
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except zipfile.BadZipFile as exc:
        raise CheckpointError(
            f"{file} is damaged, or written by torch before 1.6: fetch it again, or save it with a newer torch"
        ) from exc
    except pickle.UnpicklingError as exc:
        found = re.search(r"GLOBAL ([\w.]+)|WeightsUnpickler error: (.+)", str(exc))
        what = one_line(exc) if found is None else f"objects of {found[1]}" if found[1] else found[2].strip()
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


def _check_archive(file: Path) -> None:
    """Checks that reading a file takes no more memory than it has bytes; torch would believe what it says."""
    size = file.stat().st_size
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        held = sum(one.file_size for one in entries)
        if held > size or any(one.compress_type != zipfile.ZIP_STORED for one in entries):
            raise CheckpointError(
                f"{file} has {size} bytes and unpacks to {held}: torch.save compresses nothing, fetch it again"
            )
        pickles = [one for one in entries if one.filename.lower().endswith(".pkl")]
        described = sum(one.file_size for one in pickles)
        if described > _PICKLE_BYTES:
            raise CheckpointError(
                f"{file} describes its tensors in {described} bytes, at most {_PICKLE_BYTES} are read: fetch it again"
            )
        # The one harmless type that a few bytes can make as large as they like.
        if any(b"bytearray" in archive.read(one) for one in pickles):
            raise pickle.UnpicklingError("GLOBAL builtins.bytearray")


def _flattened(state: Mapping[Any, Any], file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of nested dictionaries under joined names, after checking them."""
    pending: list[tuple[Mapping[Any, Any], str, int]] = [(state, "", 0)]
    num_entries, num_bytes, limit = 0, 0, 2 * file.stat().st_size
    while pending:
        level, before, depth = pending.pop()
        num_entries += len(level)
        keys_fit = all(isinstance(key, str) and len(key) <= _KEY_CHARS for key in level)
        if depth > _DEPTH or num_entries > _MOST_ENTRIES or not keys_fit:
            raise CheckpointError(
                f"{file} is not a model's state: under {before[:_KEY_CHARS]!r} it has keys that are not names of up to "
                f"{_KEY_CHARS} characters, more than {_MOST_ENTRIES} entries, or {_DEPTH} levels: fetch it again"
            )
        for key, value in level.items():
            if isinstance(value, Mapping):
                pending.append((value, f"{before}{key}.", depth + 1))
            elif isinstance(value, Tensor):
                _check_plain(f"{before}{key}", value, file)
                num_bytes += value.numel() * value.element_size()
                if num_bytes > limit:
                    raise CheckpointError(
                        f"{before}{key} in {file} claims a shape of {list(value.shape)}, more than the file's "
                        f"{limit // 2} bytes: fetch it again"
                    )
                yield f"{before}{key}", value.detach()


def _check_plain(name: str, tensor: Tensor, file: Path) -> None:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested
    if not is_plain or tensor.device.type != "cpu" or tensor.is_quantized:
        raise CheckpointError(
            f"{name} in {file} is a {type(tensor).__name__} of {tensor.dtype}, {tensor.layout} on {tensor.device}: "
            "save it as a plain tensor"
        )
