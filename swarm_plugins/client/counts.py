"""What a client has done so far: cheap to count, for monitors."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from swarm_plugins.errors import SwarmError
from swarm_plugins.transport.counts import StreamCounts


@dataclass
class ClientCounts:
    """Counts of a connection since its start; written on its event loop, read by any thread."""

    passes: Counter[str] = field(default_factory=Counter)
    """Passes through the chain that succeeded: ``forward`` and ``backward`` of a batch, ``step`` of a session."""
    round_trips: Counter[str] = field(default_factory=Counter)
    """Answers of servers, refusals too, by what was asked."""
    waited_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds from request to answer, of all of them together; requests that are under way at once count each."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failures of servers, by the class of the error."""
    retries: int = 0
    """Failures after which another server, or the same one, was asked again."""
    replays: int = 0
    """Sessions replayed on another server because theirs was lost or had become slow."""
    bans: int = 0
    """How often a server was left out for a while."""
    streams: StreamCounts = field(default_factory=StreamCounts)

    def answered(self, work: str, seconds: float) -> None:
        """Counts an answer."""
        self.round_trips[work] += 1
        self.waited_s[work] += seconds

    def failed(self, error: SwarmError) -> None:
        """Counts a failure."""
        self.failures[type(error).__name__] += 1

    def totals(self) -> dict[str, float]:
        """Returns everything as plain numbers, by name."""
        return {
            "sent_bytes": self.streams.sent_bytes,
            "received_bytes": self.streams.received_bytes,
            "passes": self.passes.total(),
            "round_trips": self.round_trips.total(),
            "failures": self.failures.total(),
            "retries": self.retries,
            "replays": self.replays,
            "bans": self.bans,
        }
