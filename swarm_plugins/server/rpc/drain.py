"""``rpc_drain``: a server's operator asks it to drain and to end, from anywhere.

The operator is whoever has the server's identity file: the request is signed with the server's own key. It names a
moment and the server, so it cannot be used later, or on another server; only the server itself receives it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from swarm_plugins.errors import RemoteError
from swarm_plugins.ledger import Charge
from swarm_plugins.server.failures import BadRequestError
from swarm_plugins.server.rpc.handlers import Answer
from swarm_plugins.server.service import ExpertsService, Service
from swarm_plugins.transport.config import NodeConfig
from swarm_plugins.transport.identity import Identity, is_signed_by
from swarm_plugins.transport.messages import DrainAccepted, DrainRequest, Failure
from swarm_plugins.transport.node import SwarmNode

_VALID_S = 60.0


@dataclass(frozen=True)
class Operator:
    """Who may drain a server, and what happens then."""

    identity: Identity
    drain_s: float
    """How long open sessions may go on."""
    ask_to_end: Callable[[], object]


def drain_request(identity: Identity) -> DrainRequest:
    """Returns a request, valid for a minute, that the server with this identity obeys."""
    now = time.time()
    return DrainRequest(issued_at=now, signature=identity.sign(_signed_bytes(identity.peer_id, now)))


async def ask_to_drain(config: NodeConfig, identity: Identity, *, timeout_s: float) -> DrainAccepted:
    """Asks the server with this identity to drain, by a node of ``config``.

    Raises:
        TransportError: If it cannot be reached, or refuses.
    """
    async with SwarmNode(config) as node:
        channel = await node.open(identity.peer_id, "rpc_drain", timeout_s=timeout_s)
        try:
            await channel.send(drain_request(identity))
            answer = await channel.receive(timeout_s=timeout_s)
        finally:
            await channel.close()
    if isinstance(answer, DrainAccepted):
        return answer
    why = answer.message if isinstance(answer, Failure) else "it was started without --identity, or closed the stream"
    raise RemoteError(f"server {identity.peer_id} does not drain: {why}")


async def answer_drain(
    service: Service | ExpertsService, operator: Operator, request: DrainRequest, _: Charge
) -> Answer:
    """Answers how many sessions are open; then the server drains."""
    identity = operator.identity
    if not abs(time.time() - request.issued_at) <= _VALID_S:
        raise BadRequestError("the request to drain is not of this minute: do the clocks agree?")
    if not is_signed_by(identity.public_key, _signed_bytes(identity.peer_id, request.issued_at), request.signature):
        raise BadRequestError("the request is not signed with this server's key: give its identity file")
    operator.ask_to_end()
    sessions = len(service.sessions) if isinstance(service, Service) else 0
    return DrainAccepted(sessions=sessions, drain_s=operator.drain_s), "none"


def _signed_bytes(peer_id: str, issued_at: float) -> bytes:
    return f"swarm_plugins drain {peer_id} {issued_at!r}".encode()
