"""Chains for the chunks of one batch, which are under way at the same time.

Servers with the same blocks share the chunks by their speed, as in Ryabinin et al. 2023, "SWARM parallelism", section
3.2; but a client knows all chunks of its batch, so it plans instead of drawing.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from swarm_plugins.borders import NO_TIES
from swarm_plugins.routing.chain import Demand, ServerEntry, SpanChoice, plan, way_s

_REQUEST_S = 0.002
"""What a request takes of its server and its client besides the blocks."""
_LEAST_GAIN = 0.05
"""Share of the time that more chunks have to save, for they cost processor time on both ends."""
_LEAST_GAIN_S = 0.05
"""Seconds that they have to save: less is within the noise of what is known of the servers."""
_MOST_DOUBLED = 64.0


class Schedule(NamedTuple):
    """Chains of some chunks, in their order, and how long it takes until all of them are through."""

    chains: list[list[SpanChoice]]
    seconds: float


def schedule(
    servers: Sequence[ServerEntry],
    blocks: range,
    chunk_tokens: Sequence[int],
    *,
    seed: int | None = None,
    closed: Collection[tuple[str, str]] | None = None,
    tied: Collection[int] = NO_TIES,
) -> Schedule | None:
    """Returns chains for chunks of so many tokens, or None if some block has no server.

    A server's time counts twice as much with each chunk that it has been given, so that the servers of a block end up
    with as much work in seconds (Aspnes et al. 1997, "On-line routing of virtual circuits", section 3).
    """
    entries = {server.peer: server for server in servers}
    work_s: dict[str, float] = {}
    unit_s = 0.0
    chains: list[list[SpanChoice]] = []
    for tokens in chunk_tokens:
        laden = [_laden(server, work_s.get(server.peer, 0.0) / unit_s) if unit_s else server for server in servers]
        chain = plan(laden, blocks, Demand(tokens=tokens), seed=seed, closed=closed, tied=tied)
        if chain is None:
            return None
        chains.append(chain)
        took = [_span_s(span, entries[span.peer], tokens) for span in chain]
        unit_s = unit_s or max(took)
        for span, seconds in zip(chain, took, strict=True):
            work_s[span.peer] = work_s.get(span.peer, 0.0) + seconds
    return Schedule(chains, _seconds(chains, entries, chunk_tokens, closed))


def _laden(server: ServerEntry, units: float) -> ServerEntry:
    factor = 2.0 ** min(units, _MOST_DOUBLED)
    return replace(server, step_s=server.step_s * factor, throughput=server.throughput / factor)


def _span_s(span: SpanChoice, server: ServerEntry, tokens: int) -> float:
    """Returns how long a server works on a chunk: its weights are read once for each, however small it is."""
    token_s = 1.0 / server.throughput if server.throughput > 0 else 0.0
    return (span.end - span.start) * (server.step_s + tokens * token_s) + _REQUEST_S


def _seconds(
    chains: Sequence[Sequence[SpanChoice]],
    entries: Mapping[str, ServerEntry],
    tokens: Sequence[int],
    closed: Collection[tuple[str, str]] | None,
) -> float:
    """Returns when the last chunk is through, if each server takes them in the order in which they come."""
    coming = [(entries[chain[0].peer].round_trip_s / 2, chunk, 0) for chunk, chain in enumerate(chains)]
    heapq.heapify(coming)
    free_at: dict[str, float] = {}
    end = 0.0
    while coming:
        at, chunk, index = heapq.heappop(coming)
        span, chain = chains[chunk][index], chains[chunk]
        server = entries[span.peer]
        done = free_at[span.peer] = max(at, free_at.get(span.peer, 0.0)) + _span_s(span, server, tokens[chunk])
        if index + 1 < len(chain):
            heapq.heappush(coming, (done + _way_s(server, entries[chain[index + 1].peer], closed), chunk, index + 1))
        end = max(end, done + server.round_trip_s / 2)
    return end


def _way_s(one: ServerEntry, two: ServerEntry, closed: Collection[tuple[str, str]] | None) -> float:
    hands_on = closed is not None and one.pushes and two.pushes and (one.peer, two.peer) not in closed
    return way_s(one, two) if hands_on else (one.round_trip_s + two.round_trip_s) / 2


def best_schedule(
    servers: Sequence[ServerEntry],
    blocks: range,
    options: Iterable[Sequence[int]],
    *,
    seed: int | None = None,
    closed: Collection[tuple[str, str]] | None = None,
    tied: Collection[int] = NO_TIES,
) -> Schedule | None:
    """Returns the schedule of the first option, or that of a later one if it saves enough; None: no server.

    Args:
        servers: The servers to choose from.
        blocks: The blocks to cover.
        options: Tokens of the chunks, for ever more chunks.
        seed: As in `plan`.
        closed: As in `plan`.
        tied: As in `plan`.
    """
    best: Schedule | None = None
    for chunk_tokens in options:
        if best is not None and best.seconds < _LEAST_GAIN_S:
            break
        found = schedule(servers, blocks, chunk_tokens, seed=seed, closed=closed, tied=tied)
        if found is None:
            break
        if best is None or best.seconds - found.seconds >= max(_LEAST_GAIN * best.seconds, _LEAST_GAIN_S):
            best = found
    return best
