"""Which servers to ask so that all that they hold is covered."""

from __future__ import annotations

import heapq
import random
from collections.abc import Hashable, Mapping, Sequence


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
    # Popped from the end: the largest shares first, so that few servers cover much.
    peers.sort(key=lambda peer: len(shares[peer]))
    holders: dict[Hashable, list[str]] = {}
    for peer in peers:
        for part in shares[peer]:
            holders.setdefault(part, []).append(peer)
    times_held = dict.fromkeys(holders, 0)
    # With 64 of thousands of servers to choose, a round must look neither at all servers again nor at all parts.
    rarest = [(0, index, part) for index, part in enumerate(holders)]
    chosen: dict[str, None] = {}
    while rarest and len(chosen) < limit:
        times, index, part = heapq.heappop(rarest)
        candidates = holders[part]
        while candidates and candidates[-1] in chosen:
            candidates.pop()
        if candidates and times == times_held[part]:
            peer = candidates.pop()
            chosen[peer] = None
            for held in shares[peer]:
                times_held[held] += 1
        if candidates:
            heapq.heappush(rarest, (times_held[part], index, part))
    return list(chosen)
