"""What one peer, and one request, may take of a server. Nothing heavy is imported: settings are checked at once."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_plugins.errors import ConfigError
from swarm_plugins.transport.limits import DEFAULT_LIMITS

__all__ = ["ServiceLimits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceLimits:
    """What one peer, and one request, may take."""

    max_batch_tokens: int = 16_384
    """Largest ``B * S`` of one request."""

    max_backward_bytes: int = 4 << 30
    """Largest graph of a backward whose forward was not kept. A larger one is made block by block, and the graph of
    one block must be within it."""

    max_answer_bytes: int = DEFAULT_LIMITS.max_message_bytes
    """Tensors of one answer; clients take no larger message."""

    max_session_tokens: int = 32_768
    """Longest sequence of one session."""

    max_sessions_per_peer: int = 96
    """Sessions that one peer may hold open; each also holds a stream."""

    max_peer_kv_share: float = 1.0
    """Share of the KV budget that the sessions of one peer may take together."""

    idle_session_s: float = 1800.0
    """A session without a step for this long is closed."""

    idle_stream_s: float = 600.0
    """Any other stream without a request for this long is closed."""

    request_timeout_s: float = 600.0
    """Longest time that one request may wait and run."""

    def __post_init__(self) -> None:
        """Checks the values."""
        for name in self.__slots__:
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value!r}")
        if self.max_peer_kv_share > 1:
            raise ConfigError(f"max_peer_kv_share is a share, 1 at most, got {self.max_peer_kv_share}")
