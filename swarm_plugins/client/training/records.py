"""What a call of a chain notes of its spans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from swarm_plugins.block_io import SpanInputs
from swarm_plugins.errors import TransportError
from swarm_plugins.transport.messages import ForwardRequest, ForwardResponse

if TYPE_CHECKING:
    from swarm_plugins.client.digests import AdapterPart
    from swarm_plugins.client.retries import ChainRetries


@dataclass(frozen=True, kw_only=True)
class SpanRun:
    """One span of a finished forward."""

    peer: str
    inputs: SpanInputs
    part: AdapterPart
    request: ForwardRequest
    response: ForwardResponse
    has_ticket: bool
    """Whether a backward may name the graph instead of sending the inputs along."""

    def without_ticket(self) -> SpanRun:
        """Returns a run whose backward sends the inputs along."""
        return replace(self, has_ticket=False)


class Attempt(NamedTuple):
    """A request of a call that several requests may fail together."""

    retries: ChainRetries
    since: int
    """The moment at which its server was chosen."""

    def check(self, peer: str) -> None:
        """Raises TransportError if another request of the call has found out that a server fails."""
        if self.retries.has_failed(peer, self.since):
            raise TransportError(f"server {peer} has failed meanwhile")
