"""What a peer may make this process hold or wait for."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from swarm_plugins.errors import ConfigError

__all__ = ["DEFAULT_LIMITS", "WireLimits"]

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class WireLimits:
    """Bounds on everything that arrives from a peer."""

    max_message_bytes: int = 512 * _MIB + 4 * _MIB
    """Largest message. The default holds hidden states of 8 x 2048 tokens of width 8192 in float32, and its masks."""

    max_metadata_bytes: int = _MIB
    """Largest metadata part; the structure of an adapter on thousands of modules fits."""

    max_tensors: int = 16_384
    """Most tensors of one message."""

    first_chunk_bytes: int = 4 * _MIB
    """Memory that a declared size alone may claim; beyond it, memory grows only as bytes arrive."""

    max_receiving_bytes: int = 4096 * _MIB
    """Most memory of all incoming messages of one node, unfinished or not yet taken, together."""

    max_streams_per_peer: int = 128
    """Streams that one peer may hold open at a server; each session is one."""

    max_streams: int = 512
    """Streams that all peers together may hold open; each costs one of the (often 1,024) open files of a process."""

    first_message_timeout_s: float = 20.0
    """How long a new stream may stay silent before it is closed."""

    min_receive_bytes_per_s: float = 16_384.0
    """A first message that arrives slower than this, after ``first_message_timeout_s``, is given up; and any message
    that the other end takes slower than this, beyond ``send_stall_timeout_s``."""

    send_stall_timeout_s: float = 60.0
    """How long the other end may accept no byte while a message is sent."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{field.name} must be positive and finite, got {value!r}")
        if self.max_metadata_bytes >= 1 << 32:
            raise ConfigError(f"max_metadata_bytes must be below 4 GiB, got {self.max_metadata_bytes}")


DEFAULT_LIMITS = WireLimits()
