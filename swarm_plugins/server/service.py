"""What the rpc handlers of a server share: the span, its limits and its stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from swarm_plugins.blocks.runner import SpanSpec
from swarm_plugins.borders import NO_TIES, longest_run
from swarm_plugins.fair_queueing import FairLock
from swarm_plugins.ledger import Ledger
from swarm_plugins.offload.held import HeldExperts
from swarm_plugins.server import limits
from swarm_plugins.server.compute.scheduler import Scheduler
from swarm_plugins.server.draining import Draining
from swarm_plugins.server.failures import RequestError
from swarm_plugins.server.hosted import HostedSpans
from swarm_plugins.server.state.activations import ActivationStore
from swarm_plugins.server.state.adapter_store import AdapterStore
from swarm_plugins.server.state.cutting import RunLimits
from swarm_plugins.server.state.gradients import KeptForward
from swarm_plugins.server.state.inbox import Inboxes
from swarm_plugins.server.state.points import Points
from swarm_plugins.server.state.prefixes import PrefixStore
from swarm_plugins.server.state.pushes import Pushes
from swarm_plugins.server.state.sessions import SessionTable
from swarm_plugins.transport.identity import Identity
from swarm_plugins.transport.server_info import ServerInfo

MAX_REQUEST_BYTES = 4 << 30
"""Most bytes of all requests that are being received, worked on and answered, unless the server says otherwise."""
_STORE_BYTES = 1 << 28
"""Budgets of graphs and of adapters, unless the server says otherwise."""


@dataclass
class ServiceCounts:
    """What a service has done so far; written on its event loop, read by any thread."""

    tokens: Counter[str] = field(default_factory=Counter)
    """Rows times tokens that were computed: ``decode`` for steps of one token a row, ``prefill`` for longer ones,
    ``reused`` for those that an earlier session had begun with; ``forward``, ``backward``; ``check`` for passes that
    are repeated to open their states; ``experts`` for rows of experts."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Requests that were answered with a failure, by its kind."""


@dataclass(kw_only=True)
class _Serving:
    """What all services have."""

    announced: ServerInfo
    """What the server announces, but for what changes by itself; see `info`."""
    scheduler: Scheduler
    max_batch_tokens: int = 16_384
    """Largest ``B * S`` of one request; of experts, most rows."""
    ledger: Ledger = field(default_factory=lambda: Ledger(MAX_REQUEST_BYTES))
    """What the requests of each peer hold."""
    counts: ServiceCounts = field(default_factory=ServiceCounts)
    draining: Draining = field(default_factory=Draining)
    unchanged: Mapping[str, Collection[int]] = field(default_factory=dict)
    """Blocks that are unchanged in other versions of the model, by version."""

    @property
    def version(self) -> str:
        """Model version; requests must name it, or one that the blocks have not changed in."""
        return self.announced.version

    @property
    def tied(self) -> Collection[int]:
        """Blocks that only run on the server of the block before."""
        return NO_TIES

    def check_version(self, version: str, blocks: range) -> None:
        """Refuses blocks of a model version whose weights are not here.

        Raises:
            RequestError: ``wrong_version``, which makes clients look up the swarm again.
        """
        if version == self.version:
            return
        same = self.unchanged.get(version)
        # A peer names any numbers: no more of them are looked at than there are blocks.
        if same is not None and blocks.stop - blocks.start <= len(same) and all(block in same for block in blocks):
            return
        raise RequestError(
            "wrong_version",
            f"this server serves {self.version}, the request is for {version[:200]!r}, blocks "
            f"{blocks.start}:{blocks.stop}: ask a server of that version",
        )

    @property
    def points(self) -> Points:
        """What other identities have done for this server, and it for them."""
        return self.scheduler.points

    def info(self) -> ServerInfo:
        """Returns what the server announces now."""
        load, served = round(self.scheduler.load, 3), self.counts.tokens.total()
        changes = {"load": load, "served_tokens": served, "also": self._also()}
        return self.draining.shown(msgspec.structs.replace(self.announced, **changes))

    def _also(self) -> tuple[tuple[str, int, int], ...]:
        served = range(self.announced.start, self.announced.end)
        runs = ((version, longest_run(served, same, self.tied)) for version, same in self.unchanged.items())
        return tuple((version, run.start, run.stop) for version, run in runs if run)

    def describe(self, **changes: object) -> ServerInfo:
        """Changes what is announced."""
        self.announced = msgspec.structs.replace(self.announced, **changes)
        return self.info()


@dataclass(kw_only=True)
class Service(_Serving):
    """Blocks with everything needed to serve them."""

    runner: HostedSpans
    max_session_tokens: int = 32_768
    """Longest sequence of one session."""
    run_limits: RunLimits = field(default_factory=RunLimits)
    """Memory of a running forward or backward, and how many tokens run at a time."""
    kv_bytes: int | None = None
    """Budget of the caches of all sessions. None: unknown."""
    activations: ActivationStore[KeptForward] = field(default_factory=lambda: ActivationStore(_STORE_BYTES))
    adapters: AdapterStore = field(default_factory=lambda: AdapterStore(_STORE_BYTES))
    uploads: FairLock = field(default_factory=FairLock)
    """Held while an adapter is checked that takes longer."""
    sessions: SessionTable = field(default_factory=lambda: SessionTable(limits.MAX_SESSIONS_OF_PEER))
    identity: Identity | None = None
    """Signs receipts. None: there are none."""
    pushes: Pushes = field(default_factory=Pushes)
    """Hands outputs on to other servers."""
    prefixes: PrefixStore
    """What sessions have begun with."""
    inboxes: Inboxes = field(default_factory=Inboxes)
    """What they hand to this one."""

    def __post_init__(self) -> None:
        self.prefixes.pool.promised = self.sessions.promised_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole model."""
        return self.announced.num_blocks

    @property
    def tied(self) -> Collection[int]:
        """Blocks that only run on the server of the block before."""
        return self.spec.tied

    @property
    def spec(self) -> SpanSpec:
        """What the span holds and accepts."""
        return self.runner.spec

    def info(self) -> ServerInfo:
        """Returns what the server announces now."""
        info = msgspec.structs.replace(
            super().info(), unkept_graphs=self.activations.num_unkept, refused_pushes=self.pushes.num_refused
        )
        if self.kv_bytes is None:
            return info
        # What idle sessions give back when it is needed is free.
        idle = sum(one.held_bytes for one in self.sessions.expired(limits.SESSION_LEASE_S))
        return msgspec.structs.replace(info, free_kv_tokens=self.runner.free_tokens(idle))


@dataclass(kw_only=True)
class ExpertsService(_Serving):
    """Experts of some blocks with everything needed to serve them."""

    held: HeldExperts
