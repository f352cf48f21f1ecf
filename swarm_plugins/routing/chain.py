"""Finds the fastest chain of servers: a shortest path over (block, server).

Letters: ``N`` blocks of the request, ``M`` servers.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from swarm_plugins.borders import NO_TIES, pieces

_LONGEST_S = 1e6
_LEAST_S = 1e-6
_ALIKE = 0.04
"""Difference of two servers that is within the noise of what is known of them."""


@dataclass(frozen=True, kw_only=True)
class ServerEntry:
    """A server, with the data that routing needs."""

    peer: str
    start: int
    end: int
    round_trip_s: float
    """Measured seconds of an empty request and its answer."""
    step_s: float
    """Announced seconds of one block for one token."""
    throughput: float
    """Announced tokens per second through one block in a batched forward."""
    free_kv_tokens: int
    kv_row_tokens: int = 0
    """Announced tokens of these that each row of a session after the first takes in addition to its own."""
    pushes: bool = False
    """Whether it hands outputs of sessions on to other servers."""
    round_trips: Mapping[str, float] = field(default_factory=dict)
    """Announced seconds of an empty request to other servers and its answer, by peer."""

    def has_room(self, demand: Demand) -> bool:
        """Returns whether a session fits into the announced memory."""
        rows_after_first = max(0, demand.kv_rows - 1)
        return demand.kv_tokens + rows_after_first * self.kv_row_tokens <= self.free_kv_tokens


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The expected load of a chain."""

    tokens: int = 1
    """New tokens of a typical request: ``B * S``."""
    kv_tokens: int = 0
    """Tokens of KV cache the session will need; 0 for requests without a session."""
    kv_rows: int = 0
    """Rows of the session; 0 for requests without a session."""
    sender: str = ""
    """Server of the blocks before, which may hand its output to the chain; empty: the client."""
    receiver: str = ""
    """Server of the blocks after, which may get the chain's output; empty: the client."""


class SpanChoice(NamedTuple):
    """Blocks ``[start, end)`` run by one peer."""

    peer: str
    start: int
    end: int


def missing_blocks(servers: Sequence[ServerEntry], blocks: range, tied: Collection[int] = NO_TIES) -> list[int]:
    """Returns the blocks that no server holds with those that they are tied to."""
    return [
        block
        for piece in pieces(blocks, tied)
        if not any(server.start <= piece.start and piece.stop <= server.end for server in servers)
        for block in piece
    ]


def plan(
    servers: Sequence[ServerEntry],
    blocks: range,
    demand: Demand,
    *,
    seed: int | None = None,
    closed: Collection[tuple[str, str]] | None = None,
    tied: Collection[int] = NO_TIES,
) -> list[SpanChoice] | None:
    """Returns the chain with the least total time, or None if some block has no server.

    A span costs one round trip and its blocks' compute. A chain may leave a server before the end of its span and
    return to it. Servers without room for the session are a last resort; servers with impossible numbers are not used,
    because a single NaN would win every comparison here.

    Args:
        servers: The servers to choose from.
        blocks: The blocks to cover.
        demand: The requests to come.
        seed: Chooses at random between servers that differ by less than `_ALIKE`, so that clients spread over them.
        closed: Servers may hand outputs on to each other, except these senders to these receivers. None: no server.
        tied: Blocks that run on the server of the block before; see `swarm_plugins.borders`.
    """
    usable = [
        server for server in servers if server.start < blocks.stop and server.end > blocks.start and _is_sane(server)
    ]
    found = _shortest(usable, blocks, demand, seed, None, tied)
    if found is None:
        return None
    if closed is not None:
        pushing = [server for server in usable if server.pushes]
        ways = _direct_ways(pushing, {server.peer: server for server in servers if server.pushes}, demand, closed)
        pushed = None if ways is None else _shortest(pushing, blocks, demand, seed, ways, tied)
        if pushed is not None and pushed.seconds < found.seconds:
            found = pushed
    return found.chain


class _Found(NamedTuple):
    chain: list[SpanChoice]
    seconds: float


class _Ways(NamedTuple):
    """Seconds between servers that hand outputs on; what a neighbor's own way to the client takes is left out."""

    there: np.ndarray
    """To each server from the client, or the server before: ``[M]``."""
    between: np.ndarray
    """``[M, M]``."""
    back: np.ndarray
    """From each server to the client, or the server after: ``[M]``."""


def way_s(one: ServerEntry, two: ServerEntry) -> float:
    """Returns the seconds from one server to another: by the client, unless both announce a shorter way.

    A server may lie about its distances to get more work. So a distance counts only if both ends announce it, as the
    longer of their figures, and as no shorter than the triangle with the client permits.
    """
    by_client_s = (one.round_trip_s + two.round_trip_s) / 2
    there, back = one.round_trips.get(two.peer), two.round_trips.get(one.peer)
    if there is None or back is None:
        return by_client_s
    least_s = abs(one.round_trip_s - two.round_trip_s)
    return min(max(there, back, least_s) / 2, by_client_s)


def _direct_ways(
    servers: Sequence[ServerEntry],
    pushing: Mapping[str, ServerEntry],
    demand: Demand,
    closed: Collection[tuple[str, str]],
) -> _Ways | None:
    """Returns the ways between servers and the demand's neighbors; None if none is shorter than by the client."""
    neighbors = [pushing[peer] for peer in (demand.sender, demand.receiver) if peer in pushing]
    everyone = [*servers, *neighbors]
    index = {server.peer: number for number, server in enumerate(everyone)}
    half_s = np.array([server.round_trip_s for server in everyone]) / 2
    by_client_s = half_s[:, None] + half_s
    ways = by_client_s.copy()
    for row, one in enumerate(everyone):
        for peer in one.round_trips:
            if (column := index.get(peer)) is not None:
                ways[row, column] = way_s(one, everyone[column])
    if (ways == by_client_s).all():
        return None
    for sender, receiver in closed:
        if sender in index and receiver in index:
            ways[index[sender], index[receiver]] = np.inf
    num_servers = len(servers)
    there = back = half_s[:num_servers]
    if demand.sender in pushing:
        there = ways[num_servers, :num_servers] - neighbors[0].round_trip_s / 2
    if demand.receiver in pushing:
        back = ways[:num_servers, -1] - neighbors[-1].round_trip_s / 2
    return _Ways(there, ways[:num_servers, :num_servers], back)


def _shortest(
    servers: Sequence[ServerEntry],
    blocks: range,
    demand: Demand,
    seed: int | None,
    ways: _Ways | None,
    tied: Collection[int],
) -> _Found | None:
    """Returns the shortest chain; ``ways`` None: by the client."""
    if not servers or missing_blocks(servers, blocks, tied):
        return None
    block_s, hop_s = _costs(servers, demand)  # [M], [M]
    last_resort_s = _last_resort_s(servers, demand)  # [M]
    if seed is not None:
        draw = np.array([_draw(seed, server.peer) for server in servers])  # [M]
        ways = None if ways is None else _Ways(*(way * draw for way in ways))
        # Without any cost, too: several servers may be unknown, or next door.
        block_s, hop_s = block_s * draw, hop_s * draw + (draw - 1.0) * _LEAST_S
    there, back = (hop_s / 2, hop_s / 2) if ways is None else (ways.there, ways.back)  # [M], [M]
    starts = np.array([server.start for server in servers])  # [M]
    ends = np.array([server.end for server in servers])  # [M]

    staying = np.full(len(servers), np.inf)  # [M]: least time so far when the last block ran on this server
    everywhere = np.arange(len(servers))
    entering, senders = there + last_resort_s, everywhere
    entered_from = np.empty((len(blocks), len(servers)), dtype=np.int64)  # [N, M]: server of the block before
    for row, block in enumerate(blocks):
        if row and block in tied:
            entering = np.full(len(servers), np.inf)
        entered_from[row] = np.where(staying <= entering, everywhere, senders)
        holds = (starts <= block) & (block < ends)
        staying = np.where(holds, np.minimum(staying, entering) + block_s, np.inf)
        leaving = staying + back
        if ways is None:
            senders = np.full(len(servers), leaving.argmin())
            entering = leaving.min() + there + last_resort_s
        else:
            coming = staying[:, None] + ways.between  # [M, M]
            senders = coming.argmin(0)
            entering = coming[senders, everywhere] + last_resort_s
    last = int(leaving.argmin())
    return _Found(_trace(servers, blocks, entered_from, last), float(leaving[last]))


class Alternative(NamedTuple):
    """A chain, and how long it is expected to take."""

    chain: list[SpanChoice]
    step_s: float
    """For one request."""
    replay_s: float
    """For all tokens so far."""


def expected(
    servers: Sequence[ServerEntry],
    blocks: range,
    demand: Demand,
    history: Demand,
    *,
    seed: int | None = None,
    closed: Collection[tuple[str, str]] | None = None,
    tied: Collection[int] = NO_TIES,
) -> Alternative | None:
    """Returns the best chain for ``demand`` and its times by the client; None if some block has no server.

    Args:
        servers: The servers to choose from.
        blocks: The blocks to cover.
        demand: The requests to come.
        history: The tokens that are to be sent first.
        seed: As in `plan`.
        closed: As in `plan`.
        tied: As in `plan`.
    """
    chain = plan(servers, blocks, demand, seed=seed, closed=closed, tied=tied)
    if chain is None:
        return None
    used = {server.peer: server for server in servers}
    step_s, replay_s = (_seconds(chain, used, one) for one in (demand, history))
    return Alternative(chain, step_s, replay_s)


def _seconds(chain: Sequence[SpanChoice], servers: Mapping[str, ServerEntry], demand: Demand) -> float:
    used = [servers[span.peer] for span in chain]
    block_s, hop_s = _costs(used, demand)
    lengths = [span.end - span.start for span in chain]
    return float((block_s * lengths + hop_s + _last_resort_s(used, demand)).sum())


@functools.lru_cache(maxsize=4096)
def _draw(seed: int, peer: str) -> float:
    return 1.0 + _ALIKE * random.Random(f"{seed} {peer}").random()


def _is_sane(server: ServerEntry) -> bool:
    # Written out: this runs for every server and plan.
    return (
        math.isfinite(server.round_trip_s + server.step_s + server.throughput)
        and server.round_trip_s >= 0
        and server.step_s >= 0
        and server.throughput >= 0
    )


def _costs(servers: Sequence[ServerEntry], demand: Demand) -> tuple[np.ndarray, np.ndarray]:
    """Returns the seconds of one block, and those of the way there and back, for each server, ``[M]``."""
    # A batched request is bound by throughput, a single token by the step time: whichever is longer.
    block_s = np.array([max(s.step_s, demand.tokens / s.throughput if s.throughput > 0 else 0.0) for s in servers])
    # Bounded: infinity means that a server does not hold a block.
    block_s = np.minimum(block_s, _LONGEST_S)
    return block_s, np.array([s.round_trip_s for s in servers])


def _last_resort_s(servers: Sequence[ServerEntry], demand: Demand) -> np.ndarray:
    """Returns the penalty of servers without room: it exceeds any honest chain."""
    return np.array([0.0 if server.has_room(demand) else 1e6 for server in servers])


def _trace(servers: Sequence[ServerEntry], blocks: range, entered_from: np.ndarray, last: int) -> list[SpanChoice]:
    owners = [last]
    for row in range(len(blocks) - 1, 0, -1):
        owners.append(int(entered_from[row, owners[-1]]))
    owners.reverse()
    chain: list[SpanChoice] = []
    for block, owner in zip(blocks, owners, strict=True):
        if chain and chain[-1].peer == servers[owner].peer:
            chain[-1] = chain[-1]._replace(end=block + 1)
        else:
            chain.append(SpanChoice(servers[owner].peer, block, block + 1))
    return chain
