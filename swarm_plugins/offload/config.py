"""The one place where a user says how much memory offloading may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarm_plugins.errors import ConfigError

__all__ = ["EXPERT_BITS", "OTHER_BITS", "OffloadConfig"]

EXPERT_BITS = (2, 3, 4, 8, 16)
"""Widths that experts can have."""
OTHER_BITS = (4, 8, 16)
"""Widths that all other weights can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Budgets and habits of the memory hierarchy of experts.

    Attributes:
        fast_bytes: Memory for experts ready to compute with, on the model's device; None: what is free when the model
            is loaded, less a reserve for activations.
        ram_bytes: Pinned RAM for experts of a CUDA device, beside ``fast_bytes``; None: what is free. Without a CUDA
            device there is one memory, and only ``fast_bytes`` counts.
        prefetch: Read the next layer's experts ahead, guessed by its own router (speculative loading, Eliseev and
            Mazur 2023, section 3.2); ``auto`` stops guessing while it does not pay.
        pinned_share: Share of ``fast_bytes`` for the busiest experts, which eviction passes over; the rest is LRU.
        expert_bits: Width of the experts in memory; None: as the checkpoint has them.
        other_bits: Width of all other weights; None: as the checkpoint has them.
        num_readers: Threads that read from disk.
        read_timeout_s: Seconds after which a read that has not ended is an error.
    """

    fast_bytes: int | None = None
    ram_bytes: int | None = None
    prefetch: bool | Literal["auto"] = "auto"
    pinned_share: float = 0.0
    expert_bits: int | None = None
    other_bits: int | None = None
    num_readers: int = 2
    read_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ConfigError: If one is out of range.
        """
        for name in ("fast_bytes", "ram_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} is {value}; allowed are 0 or more bytes, or None for what is free")
        if self.prefetch not in (True, False, "auto"):
            raise ConfigError(f"prefetch is {self.prefetch!r}; allowed are True, False and 'auto'")
        if not 0.0 <= self.pinned_share < 1.0:
            raise ConfigError(f"pinned_share is {self.pinned_share}; allowed are 0 up to (not including) 1")
        _check_bits("expert_bits", self.expert_bits, EXPERT_BITS)
        _check_bits("other_bits", self.other_bits, OTHER_BITS)
        if not 1 <= self.num_readers <= 16:
            raise ConfigError(f"num_readers is {self.num_readers}; allowed are 1 to 16 (2 saturate an SSD)")
        if not self.read_timeout_s > 0:
            raise ConfigError(f"read_timeout_s is {self.read_timeout_s}; allowed are positive seconds")


def _check_bits(name: str, bits: int | None, allowed: tuple[int, ...]) -> None:
    if bits is not None and bits not in allowed:
        raise ConfigError(
            f"{name} is {bits}; allowed are {', '.join(map(str, allowed))}, or None for the checkpoint's own"
        )
