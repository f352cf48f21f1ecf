"""Which servers are asked for their state when there are more than one client should ask."""

from __future__ import annotations

import random
from collections.abc import Mapping

__all__ = ["spread_sample"]


def spread_sample(spans: Mapping[str, tuple[int, int]], limit: int) -> list[str]:
    """Returns some servers that together hold every block that all of them hold, as evenly as can be.

    The choice is random otherwise, so that the clients of a large swarm do not all ask the same servers.

    Args:
        spans: ``(start, end)`` of each server, by peer id.
        limit: Servers to choose at most. Blocks may be left out only if that many servers cannot hold them all.
    """
    peers = list(spans)
    if len(peers) <= limit:
        return peers
    random.shuffle(peers)
    holders: dict[int, list[str]] = {}
    for peer in peers:
        for block in range(*spans[peer]):
            holders.setdefault(block, []).append(peer)
    for candidates in holders.values():
        # Taken from the end: the longest spans first, so that few servers cover much.
        candidates.sort(key=lambda peer: spans[peer][1] - spans[peer][0])
    times_held = dict.fromkeys(holders, 0)
    chosen: dict[str, None] = {}
    while len(chosen) < limit:
        # 64 of thousands of servers: each round looks at the blocks, never at all servers again.
        block = min(times_held, key=lambda each: times_held[each])
        peer = holders[block].pop()
        if peer not in chosen:
            chosen[peer] = None
            for held in range(*spans[peer]):
                if held in times_held:
                    times_held[held] += 1
        if not holders[block]:
            del times_held[block]
    return list(chosen)
