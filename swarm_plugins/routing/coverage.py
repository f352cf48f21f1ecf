"""Which servers to ask so that all that they hold is covered."""

from __future__ import annotations

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
