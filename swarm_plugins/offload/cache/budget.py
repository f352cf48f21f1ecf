"""Default device and memory budgets for experts."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import torch

from swarm_plugins.errors import CapacityError, ConfigError
from swarm_plugins.offload.config import OffloadConfig

# Kept for activations, KV caches and the rest of the machine.
_RESERVE_BYTES = 512 << 20
_RESERVE_SHARE = 0.15
_CGROUP = Path("/sys/fs/cgroup")


def choose_device(wanted: str | torch.device | None) -> torch.device:
    """Returns the device to compute on; None: a CUDA device if there is one, else the CPU.

    Raises:
        ConfigError: If the device does not exist, or is neither a CPU nor a CUDA device.
    """
    try:
        found = torch.device(wanted if wanted is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except (RuntimeError, TypeError) as exc:
        raise ConfigError(f"device is {wanted!r}; expected 'cpu', 'cuda' or 'cuda:N'") from exc
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {str(found)!r}; experts are offloaded for 'cpu', 'cuda' and 'cuda:N'")
    num_devices = torch.cuda.device_count() if found.type == "cuda" else 0
    if found.type == "cuda" and (found.index or 0) >= num_devices:
        raise ConfigError(
            f"device is {str(found)!r}, but torch finds {num_devices} CUDA devices: take another one, or 'cpu'"
        )
    return found


def least_bytes(expert_bytes: Mapping[int, int], num_experts: Mapping[int, int], num_readers: int) -> int:
    """Returns the smallest budget: one expert for each reader to fill and one to compute with, at most all."""
    largest = max(expert_bytes.values(), default=0)
    return min((num_readers + 1) * largest, all_bytes(expert_bytes, num_experts))


def all_bytes(expert_bytes: Mapping[int, int], num_experts: Mapping[int, int]) -> int:
    """Returns the size of all experts."""
    return sum(size * num_experts[layer] for layer, size in expert_bytes.items())


def choose_fast_bytes(
    config: OffloadConfig, expert_bytes: Mapping[int, int], num_experts: Mapping[int, int], device: torch.device
) -> int:
    """Returns the budget of fast memory: as configured or what is free, at most all experts as computed with.

    Raises:
        CapacityError: If it is too small to compute with.
    """
    least = least_bytes(expert_bytes, num_experts, config.num_readers)
    if config.fast_bytes is not None:
        budget, source = config.fast_bytes, f"fast_bytes is {config.fast_bytes}"
    else:
        free = free_bytes(device)
        budget = _less_reserve(free)
        source = f"{free} bytes are free, and {budget} can be used for experts"
    if budget < least:
        raise CapacityError(
            f"{source}, but at least {least} bytes are needed: one expert of "
            f"{max(expert_bytes.values(), default=0)} bytes to compute with, and one for each of "
            f"{config.num_readers} readers; raise fast_bytes, lower num_readers, or take a lower expert_bits"
        )
    return min(budget, all_bytes(expert_bytes, num_experts))


def choose_ram_bytes(config: OffloadConfig, stored_bytes: Mapping[int, int], num_experts: Mapping[int, int]) -> int:
    """Returns the budget of pinned RAM for a CUDA device: as configured or half of what is free, at most all."""
    # Pages that cannot be swapped or dropped: half is left for everything else that runs here.
    budget = config.ram_bytes if config.ram_bytes is not None else _less_reserve(free_host_bytes()) // 2
    return min(budget, all_bytes(stored_bytes, num_experts))


def holds_all(num_bytes: int, expert_bytes: Mapping[int, int], num_experts: Mapping[int, int]) -> bool:
    """Returns whether a budget has room for all experts."""
    return num_bytes >= all_bytes(expert_bytes, num_experts)


def free_bytes(device: torch.device) -> int:
    """Returns the memory of a device that this process can still take."""
    return free_host_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def free_host_bytes() -> int:
    """Returns the RAM that this process can still take: of the machine, its control group and its own limits."""
    return max(0, min([psutil.virtual_memory().available, *_process_limits(), *_group_limits()]))


def _less_reserve(free: int) -> int:
    return max(0, free - max(_RESERVE_BYTES, int(free * _RESERVE_SHARE)))


def _process_limits() -> Iterator[int]:
    memory = psutil.Process().memory_info()
    for name, used in (("RLIMIT_AS", memory.vms), ("RLIMIT_DATA", getattr(memory, "data", memory.rss))):
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY:
            yield limit - used


def _group_limits(root: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Yields what each enclosing control group, of either version, leaves; page cache counts as free."""
    for line in _text(membership).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        group = base / name.lstrip("/")
        while group.is_relative_to(base):
            limit, used = (_number(group / each) for each in names)
            if limit is not None and used is not None:
                yield limit - used + _file_pages(group / "memory.stat")
            group = group.parent


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _file_pages(path: Path) -> int:
    try:
        pairs = dict(line.split(maxsplit=1) for line in _text(path).splitlines())
    except ValueError:
        return 0
    # Only pages that can be dropped at once.
    return int(pairs.get("total_inactive_file", pairs.get("inactive_file", "0")))
