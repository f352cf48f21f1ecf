"""Writes a checkpoint file by file, in a folder that appears only when it is complete."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import Tensor

from swarm_plugins.errors import CheckpointError

T = TypeVar("T")
_LOCK_S = 1800.0


def make_once(target: Path, find: Callable[[], T | None], make: Callable[[], T]) -> T:
    """Returns what is found at a target, or makes it: of several processes that want it at once, only one does.

    Raises:
        CheckpointError: If another process makes it without end.
    """
    if (found := find()) is not None:
        return found
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{target}.lock", timeout=_LOCK_S):
            found = find()
            return make() if found is None else found
    except Timeout as exc:
        raise CheckpointError(
            f"another process has been making {target} for {_LOCK_S:g} s: end it, or delete {target}.lock"
        ) from exc


@contextlib.contextmanager
def new_folder(target: Path, *, needed_bytes: int, cure: str) -> Iterator[Path]:
    """Yields a folder that becomes the target at the end: an incomplete one is never taken for the model.

    Raises:
        CheckpointError: If the disk is too full; ``cure`` is what to do instead of freeing space.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{target.parent} has {free / 1e9:.1f} GB free, the model needs {needed_bytes / 1e9:.1f} GB: free some "
            f"space, or {cure}"
        )
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as work:
        out = Path(work) / "out"
        out.mkdir(mode=0o755)
        yield out
        out.rename(target)


class Shards:
    """Writes a given number of checkpoint files, then their index."""

    def __init__(self, folder: Path, num_files: int) -> None:
        self._folder = folder
        self._num_files = num_files
        self._weight_map: dict[str, str] = {}
        self._written = 0
        self.num_bytes = 0
        """Bytes of all tensors so far."""

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes the next file, and the index after the last one."""
        self._written += 1
        name = f"model-{self._written:05d}-of-{self._num_files:05d}.safetensors"
        save_file(dict(tensors), self._folder / name, metadata={"format": "pt"})
        self._weight_map |= dict.fromkeys(tensors, name)
        self.num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self._written == self._num_files:
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": self._weight_map}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
