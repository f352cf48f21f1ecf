"""Sessions on single servers: planned, and replayed on others when one is lost or has become slow."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from swarm_plugins.block_io import AdapterUse
from swarm_plugins.client.calls.retries import ChainRetries
from swarm_plugins.client.sessions.history import History
from swarm_plugins.client.sessions.span import SpanSession
from swarm_plugins.errors import SwarmError, UnsupportedError
from swarm_plugins.routing import Demand, SpanChoice

if TYPE_CHECKING:
    from swarm_plugins.client.servers import Servers

log = logging.getLogger(__name__)


async def planned(
    servers: Servers, blocks: range, demand: Demand, history: History, retries: ChainRetries
) -> list[SpanSession]:
    """Plans sessions for blocks; they start with the history's prefix."""
    return _parts(servers, await retries.chain(blocks, demand), blocks, history)


async def moved(servers: Servers, lost: SpanSession, demand: Demand, retries: ChainRetries) -> list[SpanSession]:
    """Replays a lost server's history on others.

    Raises:
        UnsupportedError: If an adapter is not what it was in the lost session.
    """
    if _is_outdated(servers, lost):
        raise UnsupportedError(
            f"the session on server {lost.peer} is lost, and one of its adapters has changed since its first step: "
            "no server can rebuild its cache; start with a new cache after each change of an adapter"
        )
    while True:
        parts = await planned(servers, lost.blocks, demand, lost.history, retries)
        failure = await _replay(servers, parts, lost.history)
        if failure is None:
            return parts
        retries.note(*failure)


async def faster(
    servers: Servers, current: SpanSession, spans: Sequence[SpanSession], rows: int
) -> list[SpanSession] | None:
    """Moves one of a chain's sessions off a slow server; returns None if no others are clearly faster."""
    view, length = servers.view, current.history.length
    sender, receiver = neighbors(spans, current)
    demand = Demand(tokens=rows, kv_tokens=rows * (length + 1), kv_rows=rows, sender=sender, receiver=receiver)
    found = view.alternative(current.blocks, demand, Demand(tokens=rows * length), without={current.peer})
    is_worth = found is not None and current.times.is_move_worth(found.step_s, found.replay_s)
    if found is None or not is_worth or _is_outdated(servers, current):
        return None
    log.info("server %s has become slow: its session moves to %s", current.peer, found.chain)
    parts = _parts(servers, found.chain, current.blocks, current.history)
    failure = await _replay(servers, parts, current.history)
    if failure is not None:
        # As in any call: a server that merely has no room for this session is not at fault.
        ChainRetries(view).leave_out(*failure)
        current.times.postpone()
        return None
    await current.close()
    return parts


def neighbors(spans: Sequence[SpanSession], current: SpanSession) -> tuple[str, str]:
    """Returns the peers before and after one of a chain's sessions; empty at its ends."""
    peers = ["", *(span.peer for span in spans), ""]
    position = spans.index(current)
    return peers[position], peers[position + 2]


def _is_outdated(servers: Servers, session: SpanSession) -> bool:
    """Returns whether an adapter has changed since it was first used: a replay would then build another cache."""
    known = session.history.digests
    now = servers.digests.part(AdapterUse(adapters=tuple(known)), session.blocks)
    return now.digests != tuple(known.values())


async def _replay(servers: Servers, parts: Sequence[SpanSession], history: History) -> tuple[str, SwarmError] | None:
    """Sends a history to new sessions; if that fails, closes them and returns where and why."""
    running = parts[0]
    if history.steps:
        servers.peers.counts.replays += 1
    try:
        for sent in history.merged():
            hidden = sent.hidden
            for running in parts:
                hidden = (await running.advance(replace(sent, hidden=hidden))).hidden
    except BaseException as exc:
        for part in parts:
            await part.close()
        if not isinstance(exc, SwarmError):
            raise
        return running.peer, exc
    return None


def _parts(servers: Servers, chain: Sequence[SpanChoice], blocks: range, history: History) -> list[SpanSession]:
    """Returns sessions to open for the parts of some blocks, with their parts of the history's prefix."""
    return [
        SpanSession(
            servers,
            peer,
            range(start, end),
            History(history.prefix[2 * (start - blocks.start) : 2 * (end - blocks.start)]),
        )
        for peer, start, end in chain
    ]
