"""Coverage of blocks by servers: where a new server helps most, and which servers to ask."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence

from swarm_plugins.errors import ConfigError


def block_coverage(num_blocks: int, servers: Sequence[tuple[int, int, float]]) -> list[float]:
    """Returns the announced throughput of each block, from ``(start, end, throughput)`` of each server."""
    coverage = [0.0] * num_blocks
    for start, end, throughput in servers:
        for block in range(max(start, 0), min(end, num_blocks)):
            coverage[block] += throughput
    return coverage


def choose_span(coverage: Sequence[float], num_blocks: int) -> range:
    """Returns the consecutive blocks with the least throughput in ``coverage``, for a new server.

    A chain is as fast as its slowest block, so the sorted throughputs of the span are lexicographically least; the
    first span wins a tie. After Borzunov et al. 2023, "Distributed inference and fine-tuning of large language models
    over the Internet", section 3.2.

    Raises:
        ConfigError: If the model has fewer blocks, or none are wanted.
    """
    if not 1 <= num_blocks <= len(coverage):
        raise ConfigError(f"cannot serve {num_blocks} blocks: expected 1 to {len(coverage)}, the blocks of the model")
    starts = range(len(coverage) - num_blocks + 1)
    start = min(starts, key=lambda first: (sorted(coverage[first : first + num_blocks]), first))
    return range(start, start + num_blocks)


def spread_sample(shares: Mapping[str, Sequence[Hashable]], limit: int) -> list[str]:
    """Returns a random sample of servers that covers all that is served as evenly as possible.

    Random, so that the clients of a large swarm do not all ask the same servers. Something is left out only if
    ``limit`` servers cannot cover everything.

    Args:
        shares: What each server has, such as its blocks.
        limit: Most servers in the sample.
    """
    peers = list(shares)
    if len(peers) <= limit:
        return peers
    random.shuffle(peers)
    holders: dict[Hashable, list[str]] = {}
    for peer in peers:
        for part in shares[peer]:
            holders.setdefault(part, []).append(peer)
    for candidates in holders.values():
        # Popped from the end: the largest shares first, so that few servers cover much.
        candidates.sort(key=lambda peer: len(shares[peer]))
    times_held = dict.fromkeys(holders, 0)
    chosen: dict[str, None] = {}
    while len(chosen) < limit:
        # With 64 of thousands of servers to choose, a round must not look at all servers again.
        rarest = min(times_held, key=lambda each: times_held[each])
        peer = holders[rarest].pop()
        if peer not in chosen:
            chosen[peer] = None
            for held in shares[peer]:
                if held in times_held:
                    times_held[held] += 1
        if not holders[rarest]:
            del times_held[rarest]
    return list(chosen)
