"""What the rpc handlers of one server share: the span, its limits and its stores."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from swarm_plugins.adapter_spec import AdapterSpec
from swarm_plugins.blocks.types import LoadedAdapter
from swarm_plugins.errors import ConfigError
from swarm_plugins.server.activations import ActivationStore
from swarm_plugins.server.adapters import AdapterStore
from swarm_plugins.server.scheduler import Scheduler, SchedulerRunner
from swarm_plugins.server.sessions import SessionTable
from swarm_plugins.server.training import KeptForward
from swarm_plugins.transport.limits import DEFAULT_LIMITS
from swarm_plugins.transport.messages import ServerInfo

__all__ = ["AdapterCheck", "Service", "ServiceLimits"]


AdapterCheck = Callable[[str, AdapterSpec, tuple[torch.Tensor, ...]], LoadedAdapter]
"""Checks digest, structure and tensors of an upload against the span before anything is kept."""


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


@dataclass(kw_only=True)
class Service:
    """One span with everything needed to serve it."""

    version: str
    """Model version; requests must name it."""
    num_blocks: int
    """Blocks of the whole model."""
    hidden_size: int
    """Width of the hidden states."""
    dtype: torch.dtype
    """What hidden states are computed in."""
    runner: SchedulerRunner
    scheduler: Scheduler
    info: Callable[[], ServerInfo]
    """Says what the server announces at this moment."""
    check_adapter: AdapterCheck
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    kv_tokens: int | None = None
    """Tokens that the whole KV budget holds, for the whole span; None: unknown."""
    weights: Collection[int] = ()
    """Addresses of the span's own storages."""
    activations: ActivationStore[KeptForward] = field(default_factory=lambda: ActivationStore(0))
    adapters: AdapterStore = field(default_factory=lambda: AdapterStore(0))
    sessions: SessionTable = field(default_factory=lambda: SessionTable(ServiceLimits().max_sessions_per_peer))

    @property
    def blocks(self) -> range:
        """The span."""
        return range(self.runner.start, self.runner.end)
