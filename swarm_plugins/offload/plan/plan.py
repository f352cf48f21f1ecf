"""What fits where, and which settings make the most of a given memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm_plugins.errors import CapacityError
from swarm_plugins.offload.config import OffloadConfig
from swarm_plugins.offload.plan.forecast import Forecast, Speeds, forecast
from swarm_plugins.offload.plan.sizes import ModelSizes
from swarm_plugins.offload.widths import EXPERT_BITS, GROUP_SIZES, Width, num_bits

__all__ = ["RUNTIME_BYTES", "Alternative", "OffloadPlan", "make_plan", "stored_bits_ratio"]

RUNTIME_BYTES = 450_000_000
"""What Python, torch and transformers take before any model."""
# For each group a scale and an offset of 16 bits each, or a scale of 32.
_GROUP_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The same memory with experts stored at another width."""

    expert_bits: int
    expert_bytes: int
    """Of all experts."""
    forecast: Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """An answer to: what becomes of this model in that much memory?"""

    sizes: ModelSizes
    memory_bytes: int
    fast_bytes: int
    """What is left for experts; no more than all of them take."""
    config: OffloadConfig
    speeds: Speeds
    forecast: Forecast
    alternatives: tuple[Alternative, ...]
    """Other widths, narrower ones last."""

    @property
    def fits(self) -> bool:
        """Whether every expert fits in fast memory."""
        return self.fast_bytes >= self.sizes.expert_bytes


def stored_bits_ratio(width: Width, original_bits: int) -> float:
    """Returns the size of quantized experts over that of the original ones, scales included."""
    bits = num_bits(width)
    if bits >= original_bits:
        return 1.0
    scales = _GROUP_BITS / GROUP_SIZES[width] if width in GROUP_SIZES else 0.0
    return (bits + scales) / original_bits


def make_plan(
    sizes: ModelSizes, speeds: Speeds, *, memory_bytes: int, ram_bytes: int = 0, num_readers: int = 2
) -> OffloadPlan:
    """Divides a memory between what must be in it and the experts.

    Args:
        sizes: The model.
        speeds: The machine.
        memory_bytes: Fast memory in all: the device's, or RAM if the model runs on the CPU.
        ram_bytes: Pinned RAM for experts of a device with a memory of its own.
        num_readers: Threads that read, each of which needs room for one expert.

    Raises:
        CapacityError: If what is no expert does not fit, or less than one expert for each reader and one to compute
            with is left.
    """
    fixed = sizes.other_bytes + sizes.cache_bytes + sizes.activation_bytes + RUNTIME_BYTES
    room = memory_bytes - fixed
    least = (num_readers + 1) * sizes.largest_expert_bytes
    if room < least:
        raise CapacityError(
            f"{memory_bytes} bytes are too few: {sizes.other_bytes} for the weights outside experts, "
            f"{sizes.cache_bytes} for the attention cache of {sizes.context_tokens} tokens, "
            f"{sizes.activation_bytes + RUNTIME_BYTES} for activations and libraries and {least} for "
            f"{num_readers + 1} experts make {fixed + least} bytes: give that many, or a shorter context"
        )
    fast = min(room, sizes.expert_bytes)
    has_link = speeds.link_bytes_per_s is not None
    config = OffloadConfig(
        # All of the room: the cache takes no more than the experts need, each of them padded a little.
        fast_bytes=room,
        ram_bytes=min(ram_bytes, sizes.expert_bytes - fast) if has_link else None,
        prefetch=False if fast >= sizes.expert_bytes else "auto",
        num_readers=num_readers,
    )
    return OffloadPlan(
        sizes=sizes,
        memory_bytes=memory_bytes,
        fast_bytes=fast,
        config=config,
        speeds=speeds,
        forecast=forecast(sizes, speeds, fast_bytes=fast, ram_bytes=ram_bytes),
        alternatives=tuple(_alternatives(sizes, speeds, room, ram_bytes)),
    )


def _alternatives(sizes: ModelSizes, speeds: Speeds, room: int, ram_bytes: int) -> Sequence[Alternative]:
    if sizes.quantized_bits is not None:
        return ()
    original_bits = num_bits(sizes.expert_bits)
    # Numbers alone: by size and reads, nf4 is the same as 4.
    narrower = [bits for bits in EXPERT_BITS if isinstance(bits, int) and bits < original_bits]
    found = []
    for bits in sorted(narrower, reverse=True):
        ratio = stored_bits_ratio(bits, original_bits)
        expected = forecast(sizes, speeds, fast_bytes=room, ram_bytes=ram_bytes, bits_ratio=ratio)
        found.append(Alternative(expert_bits=bits, expert_bytes=round(sizes.expert_bytes * ratio), forecast=expected))
    return found
