"""How many experts each layer should keep, measured: the budget goes where a resident expert saves most reads.

The experts of a layer stand in an order, the last to be evicted first: by how often each was used, old uses counting
less. An expert that is used is looked for there. At place ``p`` it would have been a hit in a cache of more than ``p``
experts, so the counts per place are the hits that each further resident would have brought (Mattson et al. 1970,
"Evaluation techniques for storage hierarchies"), whatever the cache holds now.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

__all__ = ["LayerNeed", "busiest", "share_budget"]

# What is believed before anything was measured: the same for each layer, less for each further resident.
_PRIOR_HITS = 1.0
# A use counts half of one that comes so many uses of the layer later. Very small: the order is that of an LRU cache.
_HALF_LIFE = 16.0
_GROWTH = 2.0 ** (1.0 / _HALF_LIFE)
_MAX_WEIGHT = 1e100
# Older hits count half at every review, so that the shares follow a text that changes.
_DECAY = 0.5


class LayerNeed:
    """The order and number of uses of one layer's experts.

    Args:
        num_experts: Experts of the layer.
    """

    def __init__(self, num_experts: int) -> None:
        self.order = list(range(num_experts))
        """Experts that are not pinned, those most worth keeping first."""
        self.counts = [0.0] * num_experts
        """Uses of each expert, older ones for less."""
        self._hits = [0.0] * num_experts
        self._scores = [0.0] * num_experts
        # Of a use now: growing, where all that was noted before would have to shrink.
        self._weight = 1.0
        self._pinned: frozenset[int] = frozenset()

    def use(self, experts: Sequence[int]) -> None:
        """Notes that experts are used together."""
        # A prompt uses most experts of a layer at once: that says nothing about which of them are worth keeping.
        is_telling = 2 * len(experts) <= len(self.counts)
        self._weight *= _GROWTH
        if self._weight > _MAX_WEIGHT:
            self._scores = [score / self._weight for score in self._scores]
            self._weight = 1.0
        for expert in experts:
            self.counts[expert] += 1
            self._scores[expert] += self._weight
        experts = [expert for expert in experts if expert not in self._pinned] if self._pinned else experts
        if is_telling:
            for expert in experts:
                self._hits[self.order.index(expert)] += 1
        gone = frozenset(experts)
        order = [*experts, *(expert for expert in self.order if expert not in gone)]
        # Stable: between equals, the last used is first. And one assignment: an interruption leaves nobody out.
        self.order = sorted(order, key=self._scores.__getitem__, reverse=True)

    def pin(self, experts: frozenset[int]) -> None:
        """Takes experts out of the order, and puts back those that no longer are pinned."""
        returning = sorted(self._pinned - experts)
        self.order, self._pinned = [expert for expert in self.order if expert not in experts] + returning, experts

    def gains(self) -> list[float]:
        """Returns the hits that the first, second ... resident brings, none more than the one before."""
        num = len(self.order)
        return _decreasing([hits + _PRIOR_HITS / (1 + place) for place, hits in enumerate(self._hits[:num])])

    def fade(self) -> None:
        """Makes what was measured so far count less than what comes."""
        self.counts = [count * _DECAY for count in self.counts]
        self._hits = [hits * _DECAY for hits in self._hits]


def share_budget(needs: Mapping[int, LayerNeed], expert_bytes: Mapping[int, int], budget_bytes: int) -> dict[int, int]:
    """Returns how many experts each layer should keep: those with the most hits per byte that fit.

    Args:
        needs: What was measured of each layer.
        expert_bytes: Size of an expert of each layer.
        budget_bytes: Bytes for all of them.
    """
    quotas = dict.fromkeys(needs, 0)
    gains = {layer: need.gains() for layer, need in needs.items()}
    # Equal gains: the layer with fewer residents first, so that equal layers get equal shares.
    queue = [(-gains[layer][0] / expert_bytes[layer], 0, layer) for layer in needs if gains[layer]]
    heapq.heapify(queue)
    left = budget_bytes
    while queue:
        _, count, layer = heapq.heappop(queue)
        if expert_bytes[layer] > left:
            continue
        left -= expert_bytes[layer]
        quotas[layer] = count + 1
        if count + 1 < len(gains[layer]):
            heapq.heappush(queue, (-gains[layer][count + 1] / expert_bytes[layer], count + 1, layer))
    return quotas


def busiest(
    needs: Mapping[int, LayerNeed], expert_bytes: Mapping[int, int], budget_bytes: int
) -> dict[int, frozenset[int]]:
    """Returns the experts of each layer with the most uses per byte that fit.

    Args:
        needs: What was measured of each layer.
        expert_bytes: Size of an expert of each layer.
        budget_bytes: Bytes for all of them.
    """
    ranked = sorted(
        (-count / expert_bytes[layer], layer, expert)
        for layer, need in needs.items()
        for expert, count in enumerate(need.counts)
        if count > 0
    )
    chosen: dict[int, set[int]] = {layer: set() for layer in needs}
    left = budget_bytes
    for _, layer, expert in ranked:
        if expert_bytes[layer] <= left:
            left -= expert_bytes[layer]
            chosen[layer].add(expert)
    return {layer: frozenset(experts) for layer, experts in chosen.items()}


def _decreasing(values: Collection[float]) -> list[float]:
    """Returns the slopes of the least concave curve above the sums of the values (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        total, size = value, 1
        while pools and pools[-1][0] * size < total * pools[-1][1]:
            other, other_size = pools.pop()
            total, size = total + other, size + other_size
        pools.append((total, size))
    return [total / size for total, size in pools for _ in range(size)]
