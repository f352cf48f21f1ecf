"""Limits on the memory and time that peers can cost this process."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from swarm_plugins.errors import ConfigError

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class WireLimits:
    """Limits of messages and streams from peers."""

    max_message_bytes: int = 512 * _MIB + 4 * _MIB
    """Largest message. The default holds hidden states of 8 x 2048 tokens of width 8192 in float32, and its masks."""

    max_metadata_bytes: int = _MIB
    """Largest metadata of a message; fits the structure of an adapter on thousands of modules."""

    max_tensors: int = 16_384
    """Most tensors of one message: an adapter, or its gradients."""

    max_request_tensors: int = 1024
    """Most tensors of a request that is not the upload of an adapter; keys and values of a prefix are two for each
    block. Decoding one takes 7 us, in which nothing else happens on a server's event loop."""

    first_chunk_bytes: int = 4 * _MIB
    """Memory allocated for a declared size alone; beyond it, memory grows only as bytes arrive."""

    max_receiving_bytes: int = 4096 * _MIB
    """Most memory for all incoming messages of a node together: unfinished, unread and, at a server, unanswered."""

    max_streams: int = 512
    """Most open streams of all peers; each takes one of the (often 1,024) open files of a process."""

    max_peer_stream_share: float = 0.25
    """Share of the streams that one peer may hold; less when others hold many, so that some are always left."""

    first_message_timeout_s: float = 20.0
    """Longest silence of a new stream before it is closed, and time that any message may take to arrive."""

    min_receive_bytes_per_s: float = 16_384.0
    """Slowest pace of a message after ``first_message_timeout_s``, and of a reader after ``send_stall_timeout_s``;
    slower streams are closed."""

    max_message_s: float = 300.0
    """Longest time that a message may take to arrive, at any pace."""

    send_stall_timeout_s: float = 60.0
    """Longest time for which the other end may accept no byte of a message."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{field.name} must be positive and finite, got {value!r}")
        if self.max_metadata_bytes >= 1 << 32:
            raise ConfigError(f"max_metadata_bytes must be below 4 GiB, got {self.max_metadata_bytes}")


DEFAULT_LIMITS = WireLimits()
