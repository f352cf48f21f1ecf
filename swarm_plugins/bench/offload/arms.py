"""The ways to run one model that are compared: everything in memory, offloaded in three ways, and by accelerate."""

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

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.moe import is_fused_experts
from swarm_plugins.offload import OffloadConfig, load_offloaded
from swarm_plugins.offload.model.outline import stored_dtype
from swarm_plugins.offload.plan.sizes import meta_model

__all__ = ["ArmName", "LoadedArm", "load_arm"]


class ArmName(StrEnum):
    """What is compared."""

    RESIDENT = "all resident (transformers)"
    FULL = "offloaded"
    NO_GUESSES = "without speculative loading"
    BARE = "without cache and speculation"
    ACCELERATE = "accelerate disk offload"

    @property
    def is_ours(self) -> bool:
        """Whether experts are offloaded by this package.

        Where no control group can be made, only these run under a limit, of private memory: accelerate maps the files
        that it reads, which such a limit counts as memory though it is page cache. So that is dropped between tokens.
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
        arm: Which.
        directory: Of the model.
        fast_bytes: Memory for experts.
        smallest_bytes: The least that experts can do with: no cache to speak of.
        has_bounded_cache: Whether a limit on memory counts the page cache too.
    """
    if arm is ArmName.RESIDENT:
        yield LoadedArm(_quiet(_load_all(directory, {})), _nothing)
    elif arm is ArmName.ACCELERATE:
        with TemporaryDirectory(prefix=".accelerate-", dir=directory.parent) as folder:
            model = _load_all(directory, {"device_map": _experts_on_disk(directory), "offload_folder": folder})
            files = [*directory.glob("*.safetensors"), *(path for path in Path(folder).rglob("*") if path.is_file())]
            yield LoadedArm(_quiet(model), _nothing if has_bounded_cache else lambda: _drop_page_cache(files))
    else:
        config = OffloadConfig(
            fast_bytes=smallest_bytes if arm is ArmName.BARE else fast_bytes,
            prefetch="auto" if arm is ArmName.FULL else False,
        )
        yield LoadedArm(_quiet(load_offloaded(directory, config, device="cpu")), _nothing)


def _quiet(model: PreTrainedModel) -> PreTrainedModel:
    model.eval()
    model.requires_grad_(False)
    return model


def _nothing() -> None:
    pass


def _load_all(directory: Path, options: dict[str, Any]) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", experts_implementation="grouped_mm", **options
    )
    return model


def _experts_on_disk(directory: Path) -> dict[str, str]:
    """Returns a map that leaves everything in memory but the experts."""
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
    """Makes the next read of the files a read from the disk: a limit on memory has no room for their pages."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # What is not yet written cannot be dropped.
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
