"""Writes a directory of weights: whole or not at all, experts one at a time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from swarm_plugins.errors import CheckpointError, ConfigError

PAGE_BYTES = 4096
"""Every buffer starts at a multiple of this in its file, so that it can be read alone past the page cache."""


def padded_bytes(num_bytes: int) -> int:
    """Returns the size of a buffer in a file."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def write_buffers(path: Path, num_bytes: int, buffers: Iterable[tuple[str, Tensor]], names: Iterable[str]) -> None:
    """Writes buffers, ``[num_bytes]`` of uint8 each, to a safetensors file, and waits until they are on the disk.

    They are taken one at a time, with the names that are given beforehand.

    Raises:
        OSError: If it cannot be written.
    """
    size = padded_bytes(num_bytes)
    entries = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [index * size, (index + 1) * size]}
        for index, name in enumerate(names)
    }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header = header.ljust(padded_bytes(len(header) + 8) - 8)
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, buffer in buffers:
            if name not in entries or buffer.shape != (num_bytes,) or buffer.dtype != torch.uint8:
                raise ValueError(f"buffer {name!r} was not announced, or is not {num_bytes} bytes long")
            file.write(buffer.numpy().data)
            file.write(bytes(size - num_bytes))
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, content: object) -> None:
    """Writes an indented JSON file."""
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


@contextlib.contextmanager
def work_directory(target: Path) -> Iterator[Path]:
    """Yields an empty directory that only this process has, and moves it to its target if the body succeeds.

    Raises:
        ConfigError: If the target exists, cannot be made, or another process is making it.
    """
    _check_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    lock_path = target.with_name(f".{target.name}.lock")
    lock = FileLock(lock_path)
    try:
        lock.acquire(timeout=0)
    except Timeout as exc:
        raise ConfigError(f"another process is writing {target}: wait for it or give another directory") from exc
    work = target.with_name(f".{target.name}.partial")
    try:
        _check_free(target)
        # Left behind by a killed run.
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        yield work
        # Or a name could outlive a loss of power whose content does not.
        for path in work.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        _sync_directory(work)
        work.rename(target)
        _sync_directory(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        # While it is held: a process that has opened it sees that its name is gone, and opens another one.
        lock_path.unlink(missing_ok=True)
        lock.release()


def check_space(target: Path, needed: int) -> None:
    """Checks that so many bytes are free where a target will be.

    Raises:
        CheckpointError: If they are not.
    """
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise CheckpointError(
            f"{target.parent} has {free / 1e9:.2f} GB free, the store needs up to {needed / 1e9:.2f} GB: free some "
            "space or give another directory"
        )


def _check_free(target: Path) -> None:
    if target.exists() and not (target.is_dir() and not os.listdir(target)):
        raise ConfigError(f"{target} exists: give another directory, or remove it")
    above = next(parent for parent in target.absolute().parents if parent.exists())
    if not above.is_dir():
        raise ConfigError(f"{target} cannot be made, {above} is a file: give another directory")


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        # Some file systems cannot sync directories.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
