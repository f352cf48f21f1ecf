"""Settings of offloading: budgets and habits."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_plugins.errors import ConfigError
from swarm_plugins.weights.widths import Width, check_width

# No machine has as much: a larger number is a mistaken unit, or an attack.
_MAX_BYTES = 1 << 50
_MAX_READERS = 16
POLICIES = ("counting", "lru")
# The longest wait that threads take on any system.
_MAX_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Budgets and habits of the memory hierarchy of experts.

    Beside the budgets, each reader may hold one expert as the checkpoint has it, 0.35 GB for Mixtral-8x7B: on a CPU if
    it is computed with in another width or type, with a CUDA device while ``ram_bytes`` has no room for it.

    Attributes:
        fast_bytes: Memory for experts ready to compute with, on the model's device; None: what is free when the model
            is loaded, less a reserve for activations.
        ram_bytes: Pinned RAM for experts of a CUDA device, in addition to ``fast_bytes``; None: half of what is free.
            Without a CUDA device there is one memory, and only ``fast_bytes`` counts.
        prefetch: Read the next layers' experts ahead, guessed by their own routers (speculative loading, Eliseev and
            Mazur 2023, section 3.2). Guesses are read only while nothing needed waits for the disk. None: yes, unless
            the disk is not needed, since memory or pinned RAM of a CUDA device holds all experts.
        expert_bits: Width of the experts in memory: 16, 8, 4, 3, 2, ``nf4``, or ``4dq``, ``3dq``, ``2dq`` with scales
            quantized as well; None: as the checkpoint has them. Quantizing on the way to a CUDA device gives nf4 for 4.
        other_bits: Width of all other weights, one of the same; None: as the checkpoint has them.
        policy: Which experts stay in fast memory: ``counting``, those used most often lately, of all layers together;
            or ``lru``, the paper's: as many of each layer as the budget has room for besides four that are read ahead,
            and the least recently used one goes (Eliseev and Mazur 2023, section 3.1); all, if the budget holds them.
        num_readers: Threads that read from disk.
        read_timeout_s: Seconds until an unfinished read is an error.

    Raises:
        ConfigError: If a value has another type or is out of range.
    """

    fast_bytes: int | None = None
    ram_bytes: int | None = None
    prefetch: bool | None = None
    expert_bits: Width | None = None
    other_bits: Width | None = None
    policy: str = "counting"
    num_readers: int = 2
    read_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("fast_bytes", "ram_bytes"):
            value = getattr(self, name)
            if value is not None and not (_is_whole(value) and 0 <= value <= _MAX_BYTES):
                raise ConfigError(
                    f"{name} is {value!r}; expected a whole number of bytes from 0 to {_MAX_BYTES}, or None for "
                    "what is free"
                )
        if self.prefetch is not None and not isinstance(self.prefetch, bool):
            raise ConfigError(f"prefetch is {self.prefetch!r}; expected True, False, or None to read ahead if it pays")
        for name in ("expert_bits", "other_bits"):
            if getattr(self, name) is not None:
                check_width(name, getattr(self, name), ", or None for the checkpoint's own")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy is {self.policy!r}; expected {' or '.join(POLICIES)}")
        if not (_is_whole(self.num_readers) and 1 <= self.num_readers <= _MAX_READERS):
            raise ConfigError(f"num_readers is {self.num_readers!r}; expected 1 to {_MAX_READERS} (2 saturate an SSD)")
        if not (_is_number(self.read_timeout_s) and 0 < self.read_timeout_s <= _MAX_TIMEOUT_S):
            raise ConfigError(
                f"read_timeout_s is {self.read_timeout_s!r}; expected above 0 to {_MAX_TIMEOUT_S:.0f} seconds"
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value)
