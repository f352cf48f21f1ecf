"""Finds the fastest chain of servers: a shortest path over (block, server).

Letters: ``N`` blocks of the request, ``M`` servers.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_LONGEST_S = 1e6
_LEAST_S = 1e-6
_ALIKE = 0.02
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


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The expected load of a chain."""

    tokens: int = 1
    """New tokens of a typical request: ``B * S``."""
    kv_tokens: int = 0
    """Tokens of KV cache the session will need; 0 for requests without a session."""


class SpanChoice(NamedTuple):
    """Blocks ``[start, end)`` run by one peer."""

    peer: str
    start: int
    end: int


def missing_blocks(servers: Sequence[ServerEntry], blocks: range) -> list[int]:
    """Returns the blocks that no server holds."""
    return [block for block in blocks if not any(server.start <= block < server.end for server in servers)]


def plan(
    servers: Sequence[ServerEntry], blocks: range, demand: Demand, *, seed: int | None = None
) -> list[SpanChoice] | None:
    """Returns the chain with the least total time, or None if some block has no server.

    A span costs one round trip and its blocks' compute. A chain may leave a server before the end of its span and
    return to it. Servers without room for the session are a last resort; servers with impossible numbers are not used,
    because a single NaN would win every comparison here.

    With a ``seed``, servers that differ by less than `_ALIKE` are chosen at random, so that clients spread over them.
    """
    usable = [
        server for server in servers if server.start < blocks.stop and server.end > blocks.start and _is_sane(server)
    ]
    if not usable or missing_blocks(usable, blocks):
        return None
    block_s, hop_s = costs(usable, demand)  # [M], [M]
    if seed is not None:
        draw = np.array([_draw(seed, server.peer) for server in usable])  # [M]
        # Without any cost, too: several servers may be unknown, or next door.
        block_s, hop_s = block_s * draw, hop_s * draw + (draw - 1.0) * _LEAST_S
    starts = np.array([server.start for server in usable])  # [M]
    ends = np.array([server.end for server in usable])  # [M]

    staying = np.full(len(usable), np.inf)  # [M]: least time so far when the last block ran on this server
    best, best_server = 0.0, -1
    everywhere = np.arange(len(usable))
    entered_from = np.empty((len(blocks), len(usable)), dtype=np.int64)  # [N, M]: server of the block before
    for row, block in enumerate(blocks):
        entering = best + hop_s
        entered_from[row] = np.where(staying <= entering, everywhere, best_server)
        holds = (starts <= block) & (block < ends)
        staying = np.where(holds, np.minimum(staying, entering) + block_s, np.inf)
        best_server = int(staying.argmin())
        best = float(staying[best_server])
    return _trace(usable, blocks, entered_from, best_server)


class Alternative(NamedTuple):
    """A chain, and how long it is expected to take."""

    chain: list[SpanChoice]
    step_s: float
    """For one request."""
    replay_s: float
    """For all tokens so far."""


def expected(
    servers: Sequence[ServerEntry], blocks: range, demand: Demand, history: Demand, *, seed: int | None = None
) -> Alternative | None:
    """Returns the best chain for ``demand`` and its times; None if some block has no server.

    Args:
        servers: The servers to choose from.
        blocks: The blocks to cover.
        demand: The requests to come.
        history: The tokens that are to be sent first.
        seed: As in `plan`.
    """
    chain = plan(servers, blocks, demand, seed=seed)
    if chain is None:
        return None
    used = {server.peer: server for server in servers}
    step_s, replay_s = (_seconds(chain, used, one) for one in (demand, history))
    return Alternative(chain, step_s, replay_s)


def _seconds(chain: Sequence[SpanChoice], servers: Mapping[str, ServerEntry], demand: Demand) -> float:
    block_s, hop_s = costs([servers[span.peer] for span in chain], demand)
    return float((block_s * [span.end - span.start for span in chain] + hop_s).sum())


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


def costs(servers: Sequence[ServerEntry], demand: Demand) -> tuple[np.ndarray, np.ndarray]:
    """Returns the seconds of one block, and those of the way there and back, for each server, ``[M]``."""
    # A batched request is bound by throughput, a single token by the step time: whichever is longer.
    block_s = np.array([max(s.step_s, demand.tokens / s.throughput if s.throughput > 0 else 0.0) for s in servers])
    # Bounded: infinity means that a server does not hold a block.
    block_s = np.minimum(block_s, _LONGEST_S)
    # A full server is a last resort: its penalty exceeds any honest chain.
    full = np.array([demand.kv_tokens > s.free_kv_tokens for s in servers])
    return block_s, np.array([s.round_trip_s for s in servers]) + full * 1e6


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
