"""The ways to run one model that are compared: all in memory, offloaded in three ways, and offloaded by accelerate."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins.bench.arms import frozen
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.moe import is_fused_experts
from swarm_plugins.offload import OffloadConfig, load_offloaded
from swarm_plugins.offload.model.outline import meta_model, stored_dtype

__all__ = ["ArmName", "LoadedArm", "load_arm"]


class ArmName(StrEnum):
    """One way to run the model, in the words of the tables."""

    RESIDENT = "all resident (transformers)"
    FULL = "offloaded"
    NO_GUESSES = "without speculative loading"
    BARE = "without cache and speculation"
    ACCELERATE = "accelerate disk offload"

    @property
    def is_ours(self) -> bool:
        """Whether experts are offloaded by this package.

        Without a control group only these run under a limit, on private memory: accelerate maps the files that it
        reads, and such a limit counts the maps although they are page cache. Its cache is dropped between tokens.
        """
        return self in (ArmName.FULL, ArmName.NO_GUESSES, ArmName.BARE)


@dataclass(frozen=True)
class LoadedArm:
    """A model that is ready to decode."""

    model: PreTrainedModel
    before_token: Callable[[], None]
    """Run between tokens."""


@contextmanager
def load_arm(
    arm: ArmName, directory: Path, *, fast_bytes: int, smallest_bytes: int, has_bounded_cache: bool
) -> Iterator[LoadedArm]:
    """Loads the model in one of the ways.

    Args:
        arm: The way.
        directory: Directory of the model.
        fast_bytes: Memory for experts.
        smallest_bytes: Least memory that experts need: next to no cache.
        has_bounded_cache: Whether a limit on memory counts the page cache too.
    """
    if arm is ArmName.RESIDENT:
        yield LoadedArm(frozen(_load_all(directory, {})), lambda: None)
    elif arm is ArmName.ACCELERATE:
        with TemporaryDirectory(prefix=".accelerate-", dir=directory.parent) as folder:
            model = _load_all(directory, {"device_map": _experts_on_disk(directory), "offload_folder": folder})
            files = [*directory.glob("*.safetensors"), *(path for path in Path(folder).rglob("*") if path.is_file())]
            yield LoadedArm(frozen(model), (lambda: None) if has_bounded_cache else (lambda: _drop_page_cache(files)))
    else:
        config = OffloadConfig(
            fast_bytes=smallest_bytes if arm is ArmName.BARE else fast_bytes,
            prefetch="auto" if arm is ArmName.FULL else False,
        )
        yield LoadedArm(frozen(load_offloaded(directory, config, device="cpu")), lambda: None)


def _load_all(directory: Path, options: dict[str, Any]) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", experts_implementation="grouped_mm", **options
    )
    return model


def _experts_on_disk(directory: Path) -> dict[str, str]:
    """Returns a device map that keeps all but the experts in memory."""
    checkpoint = Checkpoint.open(directory)
    places: dict[str, str] = {}
    _place(meta_model(checkpoint.config, stored_dtype(checkpoint)), "", places)
    return places


def _place(module: nn.Module, name: str, places: dict[str, str]) -> None:
    if is_fused_experts(module):
        places[name] = "disk"
    elif name and not any(is_fused_experts(inner) for inner in module.modules()):
        places[name] = "cpu"
    else:
        prefix = f"{name}." if name else ""
        places.update({f"{prefix}{own}": "cpu" for own, _ in module.named_parameters(recurse=False)})
        for inner_name, inner in module.named_children():
            _place(inner, f"{prefix}{inner_name}", places)


def _drop_page_cache(files: list[Path]) -> None:
    """Makes the next read of the files a read from the disk, as under a limit that has no room for their pages."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # What is not yet written cannot be dropped.
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
