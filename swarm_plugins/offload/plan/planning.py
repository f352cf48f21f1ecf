"""Looks at a model and at this machine, and makes the plan."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.offload.cache.budget import choose_device
from swarm_plugins.offload.plan.forecast import Speeds
from swarm_plugins.offload.plan.measure import disk_rate, expert_rate, link_rate, step_seconds
from swarm_plugins.offload.plan.plan import OffloadPlan, make_plan
from swarm_plugins.offload.plan.sizes import meta_model, model_sizes

__all__ = ["Planned", "free_bytes", "measured_disk", "plan_model"]

# A middling NVMe disk; said to be a guess wherever it is used.
_ASSUMED_DISK_BYTES_PER_S = 1_000_000_000.0
# What is free now is not free to the last byte.
_USABLE_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and where its numbers come from."""

    name: str
    plan: OffloadPlan
    device: str
    disk_source: str
    """``measured``, ``given`` or ``assumed``."""


def plan_model(
    name: str,
    *,
    revision: str | None = None,
    memory_bytes: int | None = None,
    ram_bytes: int | None = None,
    context_tokens: int = 2048,
    disk_bytes_per_s: float | None = None,
    device: str = "cpu",
) -> Planned:
    """Makes the plan; of the model, only the config and the headers of its files are read.

    Args:
        name: Directory, or id on the Hub.
        revision: On the Hub.
        memory_bytes: Fast memory in all. None: most of what is free on the device.
        ram_bytes: Pinned RAM for a CUDA device. None: most of what is free.
        context_tokens: Length that the attention cache is sized for.
        disk_bytes_per_s: None: measured where the model lies here, assumed otherwise.
        device: Where to compute.

    Raises:
        CapacityError: If the model does not fit even so.
        ConfigError: If there is no such device, or it is none that experts are offloaded for.
        UnsupportedError: If it has no experts that can be offloaded.
    """
    target = choose_device(device)
    checkpoint = Checkpoint.open(name, revision=revision)
    sizes = model_sizes(checkpoint, context_tokens=context_tokens)
    source = "given" if disk_bytes_per_s else "measured" if checkpoint.directory else "assumed"
    if source == "measured":
        disk, experts = measured_disk(checkpoint, sizes.largest_expert_bytes)
    else:
        disk = experts = disk_bytes_per_s or _ASSUMED_DISK_BYTES_PER_S
    speeds = Speeds(
        disk_bytes_per_s=disk,
        expert_bytes_per_s=experts,
        step_s=step_seconds(meta_model(checkpoint.config, sizes.dtype), device=target),
        link_bytes_per_s=link_rate(target),
    )
    plan = make_plan(
        sizes,
        speeds,
        memory_bytes=free_bytes(target) if memory_bytes is None else memory_bytes,
        ram_bytes=free_bytes(torch.device("cpu")) if ram_bytes is None else ram_bytes,
    )
    return Planned(name=checkpoint.name, plan=plan, device=str(target), disk_source=source)


def free_bytes(device: torch.device) -> int:
    """Returns most of what is free on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _USABLE_SHARE)
    return int(psutil.virtual_memory().available * _USABLE_SHARE)


def measured_disk(checkpoint: Checkpoint, block_bytes: int) -> tuple[float, float]:
    """Returns bytes per second of the disk itself, and of experts read from it, for a checkpoint that lies here."""
    files = {info.file for info in checkpoint.tensors.values()}
    paths = [checkpoint.file_path(file) for file in sorted(files)]
    return disk_rate(paths, block_bytes=block_bytes), expert_rate(paths, block_bytes=block_bytes)
