"""How a request of training is asked: in its turn, and of a replica, too, if a server takes longer than as a rule."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from swarm_plugins.block_io import SpanInputs
from swarm_plugins.client.answers import OverloadedError
from swarm_plugins.client.hedging import first_answer
from swarm_plugins.errors import CapacityError, SwarmError
from swarm_plugins.routing import Demand
from swarm_plugins.transport.messages import Message

if TYPE_CHECKING:
    from swarm_plugins.client.digests import AdapterPart
    from swarm_plugins.client.discovery.view import Servers
    from swarm_plugins.client.training.records import Attempt

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
_SLACK_S = 0.02
"""Added to what a server's requests take as a rule: a delay shorter than that is not worth a request."""


async def answer_in_turn(
    servers: Servers,
    peer: str,
    part: AdapterPart,
    rpc: str,
    request: Message,
    kind: type[M],
    inputs: SpanInputs,
    attempt: Attempt,
) -> M:
    """Asks a server when it has a place for the request, and again if it had none; uploads adapters that it lacks.

    Raises:
        TransportError: Also if another request of the call has meanwhile found out that the server fails.
        SwarmError: As for any request.
    """
    peers, blocks = servers.peers, len(inputs.blocks)
    room = servers.view.known.max_batch_tokens(peer)
    while True:
        async with peers.queues.turn(peer, inputs.num_tokens, room=room):
            attempt.check(peer)
            try:
                return await peers.with_adapters(
                    peer, part.shipped, lambda: peers.request(peer, rpc, request, kind, blocks=blocks)
                )
            except (OverloadedError, CapacityError) as exc:
                refusal = exc
        if not peers.queues.refused(peer):
            raise refusal


async def won_answer(
    servers: Servers,
    peer: str,
    rpc: str,
    inputs: SpanInputs,
    without: Collection[str],
    ask: Callable[[str], Coroutine[Any, Any, tuple[str, M]]],
    accept: Callable[[str, M], Awaitable[None]],
) -> tuple[str, M]:
    """Asks a server, and a replica while it takes longer than it does as a rule; returns who answered what."""
    view = servers.view
    winner, answer = await _race(servers, peer, rpc, inputs, without, ask)
    try:
        await accept(winner, answer)
    except SwarmError as exc:
        if winner == peer:
            raise
        # The server itself is not to blame.
        view.ban(winner, exc)
        winner, answer = await ask(peer)
        await accept(winner, answer)
    view.bans.forgive(winner)
    return winner, answer


async def _race(
    servers: Servers,
    peer: str,
    rpc: str,
    inputs: SpanInputs,
    without: Collection[str],
    ask: Callable[[str], Coroutine[Any, Any, tuple[str, M]]],
) -> tuple[str, M]:
    view, paces, hedges = servers.view, servers.peers.paces, servers.hedges
    size, tokens = len(inputs.blocks), inputs.num_tokens
    usual_s = paces.usual_s(peer, rpc, blocks=size, tokens=tokens)
    hedges.earn()
    with servers.peers.queues.asking(peer, tokens) as before:
        if usual_s is None:
            return await ask(peer)
        # What was seen is without a queue; those before this one in the queue take as long for each token.
        turns = 1.0 + before / tokens
        late_s = turns * usual_s + _SLACK_S

        def ask_replica() -> Coroutine[Any, Any, tuple[str, M]] | None:
            other = view.replica(inputs.blocks, Demand(tokens=tokens), without={peer, *without})
            if other is None or not hedges.take():
                return None
            log.info("server %s has not answered for %.2f s: %s is asked too", peer, late_s, other)
            return ask(other)

        started = time.perf_counter()
        winner, answer = await first_answer(ask(peer), ask_replica, late_s=late_s)
    if winner != peer:
        # It took longer than this, and nobody will know how much.
        paces.observe(peer, rpc, blocks=size, tokens=tokens, seconds=(time.perf_counter() - started) / turns)
    return winner, answer
