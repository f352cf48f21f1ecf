"""Memory layout and expected speed for a budget, and the settings that make the most of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.checkpoint.outline import meta_model
from swarm_plugins.errors import CapacityError
from swarm_plugins.offload.cache.budget import choose_device, free_bytes, free_host_bytes
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.model.outline import without_quantization
from swarm_plugins.offload.plan.forecast import Forecast, Speeds, forecast
from swarm_plugins.offload.plan.measure import disk_rate, expert_rate, link_rate, product_seconds, step_seconds
from swarm_plugins.offload.plan.sizes import ModelSizes, PackedProducts, model_sizes
from swarm_plugins.sizes import format_bytes, size_of
from swarm_plugins.weights.formats.plain import PlainFormat
from swarm_plugins.weights.kernels.int4pack import is_native_order
from swarm_plugins.weights.widths import WIDTHS, Width, num_bits, stored_bits

RUNTIME_BYTES = 450_000_000
"""What Python, torch and transformers take before any model."""
# An average NVMe disk; reported as an assumption wherever it is used.
_ASSUMED_DISK_BYTES_PER_S = 1_000_000_000.0
# What is free now is not free to the last byte.
_USABLE_SHARE = 0.9
# Speed-ups below this are not worth another store; widths this near the fastest are as good.
_WORTHWHILE = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The same memory with experts stored at another width."""

    expert_bits: int
    expert_bytes: int
    """Of all experts."""
    forecast: Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """Memory layout and expected speed for a budget."""

    sizes: ModelSizes
    memory_bytes: int
    fast_bytes: int
    """What is left for experts; at most what all of them take."""
    config: OffloadConfig
    speeds: Speeds
    forecast: Forecast
    alternatives: tuple[Alternative, ...]
    """Other widths, narrower ones last."""

    @property
    def fits(self) -> bool:
        """Whether every expert fits in fast memory."""
        return self.fast_bytes >= self.sizes.expert_bytes

    @property
    def full_memory_bytes(self) -> int:
        """Memory in which every expert would fit."""
        return self.memory_bytes + self.sizes.expert_bytes - (self.config.fast_bytes or 0)

    @property
    def faster_width(self) -> Alternative | None:
        """The widest alternative that is about as fast as the fastest; None if none is worth while."""
        fastest = max((other.forecast.tokens_per_s for other in self.alternatives), default=0.0)
        if fastest < _WORTHWHILE * self.forecast.tokens_per_s:
            return None
        return next(other for other in self.alternatives if _WORTHWHILE * other.forecast.tokens_per_s >= fastest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and where its numbers come from."""

    name: str
    revision: str | None
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
    """Plans a model on this machine from its config and the headers of its files.

    Args:
        name: Directory, or id on the Hub.
        revision: On the Hub.
        memory_bytes: Fast memory in all. None: most of what is free on the device.
        ram_bytes: Pinned RAM for a CUDA device. None: most of what is free.
        context_tokens: Length that the cache is sized for.
        disk_bytes_per_s: None: measured for a local model, assumed otherwise.
        device: Where to compute.

    Raises:
        CapacityError: If the model does not fit even so.
        ConfigError: If the device does not exist, or experts cannot be offloaded for it.
        UnsupportedError: If the model has no experts that can be offloaded.
    """
    target = choose_device(device)
    checkpoint = Checkpoint.open(name, revision=revision)
    sizes = model_sizes(checkpoint, context_tokens=context_tokens, device=target)
    source = "given" if disk_bytes_per_s else "measured" if checkpoint.directory else "assumed"
    if source == "measured":
        disk, experts = measured_disk(checkpoint, sizes.largest_expert_bytes)
    else:
        disk = experts = disk_bytes_per_s or _ASSUMED_DISK_BYTES_PER_S
    speeds = Speeds(
        disk_bytes_per_s=disk,
        expert_bytes_per_s=experts,
        step_s=_step_s(checkpoint, sizes, target),
        link_bytes_per_s=link_rate(target),
    )
    plan = make_plan(
        sizes,
        speeds,
        memory_bytes=int(free_bytes(target) * _USABLE_SHARE) if memory_bytes is None else memory_bytes,
        ram_bytes=int(free_host_bytes() * _USABLE_SHARE) if ram_bytes is None else ram_bytes,
    )
    return Planned(name=checkpoint.name, revision=revision, plan=plan, device=str(target), disk_source=source)


def _step_s(checkpoint: Checkpoint, sizes: ModelSizes, device: torch.device) -> float:
    """Measures the products of a token."""
    plain = step_seconds(meta_model(without_quantization(checkpoint.config), sizes.dtype), device=device)
    return plain if sizes.published is None else with_packed(plain, sizes.published.products, sizes.dtype, device)


def with_packed(step_s: float, products: Sequence[PackedProducts], dtype: torch.dtype, device: torch.device) -> float:
    """Returns the seconds of a step in which products with packed weights take the place of those with plain ones.

    Args:
        step_s: With plain weights.
        products: With packed ones.
        dtype: To compute in.
        device: Where to compute.
    """
    packed = plain = 0.0
    for one in products:
        count = one.num_weights / math.prod(one.sample.shape)
        packed += count * product_seconds(one.sample, dtype, device)
        plain += count * product_seconds(PlainFormat(one.sample.shape, dtype), dtype, device)
    return max(0.0, step_s - plain) + packed


def make_plan(sizes: ModelSizes, speeds: Speeds, *, memory_bytes: int, ram_bytes: int = 0) -> OffloadPlan:
    """Divides fast memory (a device's, or RAM for the CPU) between experts and all else; pinned RAM comes on top.

    Raises:
        CapacityError: If everything else does not fit, or leaves less than one expert for each reader and one to
            compute with.
    """
    fixed = sizes.other_bytes + sizes.cache_bytes + sizes.activation_bytes + RUNTIME_BYTES
    room = memory_bytes - fixed
    num_readers = OffloadConfig().num_readers
    least = (num_readers + 1) * sizes.largest_expert_bytes
    if room < least:
        raise CapacityError(
            f"{format_bytes(memory_bytes)} are too few: {format_bytes(sizes.other_bytes)} for the weights outside "
            f"experts, {format_bytes(sizes.cache_bytes)} for the cache of {sizes.context_tokens} tokens, "
            f"{format_bytes(sizes.activation_bytes + RUNTIME_BYTES)} for activations and libraries and "
            f"{format_bytes(least)} for {num_readers + 1} experts: give {size_of(fixed + least)}, or a shorter context"
        )
    fast = min(room, sizes.expert_bytes)
    has_link = speeds.link_bytes_per_s is not None
    config = OffloadConfig(
        # All of the room: the cache takes no more than the experts need, each of them padded a little.
        fast_bytes=room,
        ram_bytes=min(ram_bytes, sizes.expert_bytes - fast) if has_link else None,
    )
    return OffloadPlan(
        sizes=sizes,
        memory_bytes=memory_bytes,
        fast_bytes=fast,
        config=config,
        speeds=speeds,
        forecast=forecast(sizes, speeds, fast_bytes=fast, ram_bytes=ram_bytes),
        alternatives=_alternatives(sizes, speeds, room, ram_bytes),
    )


def measured_disk(checkpoint: Checkpoint, block_bytes: int) -> tuple[float, float]:
    """Measures bytes per second of the disk itself, and of experts read from it, for a local checkpoint."""
    files = {info.file for info in checkpoint.tensors.values()}
    paths = [checkpoint.file_path(file) for file in sorted(files)]
    return disk_rate(paths, block_bytes=block_bytes), expert_rate(paths, block_bytes=block_bytes)


def stored_bits_ratio(width: Width, original_bits: int) -> float:
    """Returns the size of quantized experts over the size of the original ones, scales included."""
    return 1.0 if num_bits(width) >= original_bits else stored_bits(width) / original_bits


def _alternatives(sizes: ModelSizes, speeds: Speeds, room: int, ram_bytes: int) -> tuple[Alternative, ...]:
    if sizes.is_packed:
        return ()
    original_bits = num_bits(sizes.expert_bits)
    # Whole numbers only: by size and reads, nf4 is the same as 4.
    narrower = [bits for bits in WIDTHS if isinstance(bits, int) and bits < original_bits]
    # A CPU that needs codes in another order keeps them in memory as 4 bits or more.
    fewest = 4 if speeds.link_bytes_per_s is None and not is_native_order() else 0
    found = []
    for bits in sorted(narrower, reverse=True):
        stored = stored_bits_ratio(bits, original_bits)
        narrow = _narrowed(sizes, stored + max(0, fewest - bits) / original_bits, stored)
        predicted = forecast(narrow, speeds, fast_bytes=room, ram_bytes=ram_bytes)
        found.append(Alternative(expert_bits=bits, expert_bytes=narrow.expert_bytes, forecast=predicted))
    return tuple(found)


def _narrowed(sizes: ModelSizes, in_memory: float, stored: float) -> ModelSizes:
    """Returns the sizes with quantized experts, whose sizes in memory and in files are relative to the original's."""
    layers = [
        replace(one, expert_bytes=round(one.expert_bytes * in_memory), stored_bytes=round(one.expert_bytes * stored))
        for one in sizes.layers
    ]
    return replace(sizes, layers=tuple(layers))
