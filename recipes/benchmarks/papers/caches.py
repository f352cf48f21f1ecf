"""Hits of a cache of one layer's experts: least recently used, least counted, and the best that any can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from swarm_plugins.offload.cache.policy import UseCounts

Uses = Sequence[Sequence[int]]
"""The experts that each token takes, in order."""
Hits = Callable[[Uses, int, int], list[bool]]
"""Takes the uses, the number of experts of the layer and the cache's size; tells of each use whether it hit."""


def last_used(uses: Uses, num_experts: int, size: int) -> list[bool]:
    """Evicts the expert whose last use is longest ago (Eliseev and Mazur 2023, section 3.1)."""
    order: list[int] = []

    def note(experts: Sequence[int]) -> None:
        order[:] = [one for one in order if one not in experts] + list(experts)

    return _run(uses, size, lambda: order, note)


def counted(uses: Uses, num_experts: int, size: int) -> list[bool]:
    """Evicts the least used expert; a use counts half after sixteen of the layer (`swarm_plugins.offload`)."""
    counts = UseCounts(num_experts)
    return _run(uses, size, lambda: counts.order[::-1], counts.use)


def best_possible(uses: Uses, num_experts: int, size: int) -> list[bool]:
    """Keeps the experts needed soonest, an upper bound for any policy (Belady 1966).

    A token's own experts may be dropped too: they can run from buffers outside the cache, as in the paper.
    """
    found, cached = [], set[int]()
    for experts, upcoming in zip(uses, _next_uses(uses, num_experts), strict=True):
        found += [one in cached for one in experts]
        cached = set(sorted(cached | set(experts), key=upcoming.__getitem__)[:size])
    return found


def _next_uses(uses: Uses, num_experts: int) -> list[list[int]]:
    """Returns for each token, and each expert, which later token takes it next."""
    found, upcoming = [], [len(uses)] * num_experts
    for token in range(len(uses) - 1, -1, -1):
        found.append(list(upcoming))
        for expert in uses[token]:
            upcoming[expert] = token
    return found[::-1]


POLICIES: Mapping[str, Hits] = {"LRU": last_used, "counting": counted, "best possible": best_possible}


def hit_ratio(layers: Sequence[Uses], num_experts: Sequence[int], size: int, hits: Hits, *, first: int) -> float:
    """Returns the share of uses that hit, over all layers, from token ``first`` on."""
    found: list[bool] = []
    for uses, count in zip(layers, num_experts, strict=True):
        found += hits(uses, count, size)[first * len(uses[0]) :]
    return sum(found) / len(found)


def _run(
    uses: Uses, size: int, victims: Callable[[], Sequence[int]], note: Callable[[Sequence[int]], None]
) -> list[bool]:
    """Runs a cache.

    Args:
        uses: The experts of each token, fetched together.
        size: Experts in the cache.
        victims: Returns experts, the first to go first.
        note: Told of the experts of each token.
    """
    cached: set[int] = set()
    found = []
    for experts in uses:
        found += [one in cached for one in experts]
        note(experts)
        for one in experts:
            if one in cached:
                continue
            if len(cached) == size:
                order = [each for each in victims() if each in cached]
                # What this token uses goes only where there is nothing else.
                cached.remove(next((each for each in order if each not in experts), order[0]))
            cached.add(one)
    return found
