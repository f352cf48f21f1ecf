"""What the rpc handlers of a server share: the span, its limits and its stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from swarm_plugins.adapter_spec import AdapterSpec
from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.blocks.runner import SpanSpec
from swarm_plugins.ledger import Ledger
from swarm_plugins.server import limits
from swarm_plugins.server.compute.scheduler import Scheduler
from swarm_plugins.server.compute.work import Interruptible, SchedulerRunner
from swarm_plugins.server.draining import Draining
from swarm_plugins.server.state.activations import ActivationStore
from swarm_plugins.server.state.adapter_store import AdapterStore
from swarm_plugins.server.state.cutting import RunLimits
from swarm_plugins.server.state.gradients import KeptForward
from swarm_plugins.server.state.points import Points
from swarm_plugins.server.state.pushes import Pushes
from swarm_plugins.server.state.sessions import SessionTable
from swarm_plugins.server.state.slots import Slots
from swarm_plugins.transport.identity import Identity
from swarm_plugins.transport.server_info import ServerInfo

AdapterCheck = Callable[[str, AdapterSpec, tuple[torch.Tensor, ...], int], LoadedAdapter]
"""Checks digest, structure and tensors of an upload against the span and the memory of a run, before it is kept."""

MAX_REQUEST_BYTES = 4 << 30
"""Most bytes of all requests that are being received, worked on and answered, unless the server says otherwise."""


@dataclass
class ServiceCounts:
    """What a service has done so far; written on its event loop, read by any thread."""

    tokens: Counter[str] = field(default_factory=Counter)
    """Rows times tokens that were computed: ``decode`` for steps of one token a row, ``prefill`` for longer ones;
    ``forward``, ``backward``; ``check`` for passes repeated to open their states; ``experts`` for rows of experts."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Requests that were answered with a failure, by its kind."""


@dataclass(kw_only=True)
class Service:
    """One span with everything needed to serve it."""

    version: str
    """Model version; requests must name it."""
    num_blocks: int
    """Blocks of the whole model."""
    runner: SchedulerRunner
    scheduler: Scheduler
    info: Callable[[], ServerInfo]
    """Returns what the server announces now."""
    check_adapter: AdapterCheck
    weight_norms: Callable[[LoadedAdapter], tuple[torch.Tensor, ...]] = lambda adapter: ()
    """Returns the norms of weights that an adapter's layers start from; called on the compute thread."""
    max_batch_tokens: int = 16_384
    """Largest ``B * S`` of one request."""
    max_session_tokens: int = 32_768
    """Longest sequence of one session."""
    run_limits: RunLimits = field(default_factory=RunLimits)
    """Memory of a running forward or backward, and how many tokens run at a time."""
    kv_tokens: int | None = None
    """Tokens that the whole KV budget holds, for the whole span. None: unknown."""
    weights: Collection[int] = ()
    """Addresses of the span's own storages."""
    activations: ActivationStore[tuple[KeptForward, ...]] = field(default_factory=lambda: ActivationStore(0))
    adapters: AdapterStore = field(default_factory=lambda: AdapterStore(0))
    sessions: SessionTable = field(default_factory=lambda: SessionTable(limits.MAX_SESSIONS_OF_PEER))
    ledger: Ledger = field(default_factory=lambda: Ledger(MAX_REQUEST_BYTES))
    """What the requests of each peer hold."""
    counts: ServiceCounts = field(default_factory=ServiceCounts)
    draining: Draining = field(default_factory=Draining)
    identity: Identity | None = None
    """Signs receipts. None: there are none."""
    pushes: Pushes = field(default_factory=Pushes)
    """Hands outputs on to other servers."""
    slots: Slots = field(default_factory=Slots)
    """What they hand to this one, but for sessions."""

    @property
    def points(self) -> Points:
        """What other identities have done for this server, and it for them."""
        return self.scheduler.points

    @property
    def spec(self) -> SpanSpec:
        """What the span holds and accepts."""
        return self.runner.spec


class ExpertsRunner(Interruptible, Protocol):
    """Experts of some blocks, ready to compute. All calls come from one thread."""

    experts: range
    """Indices of the experts, in each block."""
    part: tuple[int, int] | None
    """``(k, n)``: only the k-th of n parts of each expert. None: whole experts."""
    dtype: torch.dtype
    device: torch.device
    hidden_size: int

    @property
    def blocks(self) -> Sequence[int]:
        """Indices of the blocks."""

    def run(
        self, block: int, rows: torch.Tensor, spans: Mapping[int, slice], grad: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Runs expert-sorted rows ``[N, D]``, or returns the gradients of the rows."""


@dataclass(kw_only=True)
class ExpertsService:
    """Experts of some blocks with everything needed to serve them."""

    version: str
    """Model version; requests must name it."""
    held: ExpertsRunner
    scheduler: Scheduler
    info: Callable[[], ServerInfo]
    """Returns what the server announces now."""
    max_batch_tokens: int = 16_384
    """Most rows of one request."""
    ledger: Ledger = field(default_factory=lambda: Ledger(MAX_REQUEST_BYTES))
    """What the requests of each peer hold."""
    counts: ServiceCounts = field(default_factory=ServiceCounts)
    draining: Draining = field(default_factory=Draining)

    @property
    def points(self) -> Points:
        """What other identities have done for this server, and it for them."""
        return self.scheduler.points
