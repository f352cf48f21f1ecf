"""Which experts stay in memory: the most used of each layer, the budget shared by need, the busiest pinned.

Pure bookkeeping without tensors and reads, so that it is tested without weights. Eliseev and Mazur (2023, section 3.1)
keep a cache per layer and evict the least recently used expert; counting uses, old ones for less, keeps more of what is
needed again (docs/benchmarks.md).

Shares are measured. The experts of a layer stand in an order, the last to be evicted first: by number of uses, old ones
counting less. A used expert is looked up in it. At place ``p`` it would have been a hit in a cache of more than ``p``
experts, so the counts per place are the hits that each further resident would have brought (Mattson et al. 1970,
"Evaluation techniques for storage hierarchies"), whatever the cache holds now.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence

from swarm_plugins.offload.interfaces import ExpertKey

# Layers used between two reviews of the quotas: first soon, then rarely.
_FIRST_REVIEW = 16
_LAST_REVIEW = 512
# Assumed before anything was measured: equal for all layers, less for each further resident.
_PRIOR_HITS = 1.0
# A use counts half of one that comes so many uses of the layer later. Very small: the order of an LRU cache.
_HALF_LIFE = 16.0
_GROWTH = 2.0 ** (1.0 / _HALF_LIFE)
_MAX_WEIGHT = 1e100
# Older hits count half at every review, so that the shares follow a text that changes.
_DECAY = 0.5


class Residency:
    """Decides which experts are resident within a budget and which have to go.

    A share of the budget is for the busiest experts, which are evicted only if nothing else can be.
    """

    def __init__(
        self,
        num_experts: Mapping[int, int],
        expert_bytes: Mapping[int, int],
        budget_bytes: int,
        pinned_share: float = 0.0,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._bytes = dict(expert_bytes)
        self._pinned_bytes = int(budget_bytes * pinned_share)
        self._needs = {layer: LayerNeed(count) for layer, count in num_experts.items()}
        self.residents: dict[int, set[int]] = {layer: set() for layer in num_experts}
        """The resident experts of each layer."""
        self._holds = {layer: [0] * count for layer, count in num_experts.items()}
        self.pinned: dict[int, frozenset[int]] = dict.fromkeys(num_experts, frozenset())
        """The experts of each layer that eviction passes over."""
        self.quotas: dict[int, int] = {}
        self._uses = 0
        self._last_use = dict.fromkeys(num_experts, 0)
        self._review_interval = _FIRST_REVIEW * len(self._needs)
        self._next_review = self._review_interval
        self._share()

    def use(self, layer: int, experts: Sequence[int]) -> None:
        """Notes that experts of a layer are used together, resident or not."""
        self._needs[layer].use(experts)
        self._uses += 1
        self._last_use[layer] = self._uses
        if self._uses >= self._next_review:
            self._review()

    def hold(self, key: ExpertKey) -> None:
        """Keeps an expert from being evicted, until `release` is called as often."""
        self._holds[key.layer][key.expert] += 1

    def release(self, key: ExpertKey) -> None:
        """Ends a `hold`."""
        self._holds[key.layer][key.expert] -= 1

    def is_held(self, key: ExpertKey) -> bool:
        """Returns whether an expert must not be evicted now."""
        return self._holds[key.layer][key.expert] > 0

    def admit(self, key: ExpertKey) -> list[ExpertKey] | None:
        """Makes an expert resident; returns those evicted to make room, or None if everything is held."""
        missing = self.used_bytes + self._bytes[key.layer] - self.budget_bytes
        victims: list[ExpertKey] = []
        if missing > 0:
            excess = self._excess()
            excess[key.layer] += 1
        while missing > 0:
            victim = self._victim(key.layer, excess, victims)
            if victim is None:
                return None
            victims.append(victim)
            excess[victim.layer] -= 1
            missing -= self._bytes[victim.layer]
        for victim in victims:
            self.drop(victim)
        self.residents[key.layer].add(key.expert)
        self.used_bytes += self._bytes[key.layer]
        return victims

    def drop(self, key: ExpertKey) -> None:
        """Forgets a resident expert."""
        self.residents[key.layer].remove(key.expert)
        self.used_bytes -= self._bytes[key.layer]

    def restore(self, residents: Iterable[ExpertKey], holds: Iterable[ExpertKey]) -> None:
        """Takes over the residents, and the held experts once per hold, after an interrupted change."""
        for layer, counts in self._holds.items():
            self.residents[layer] = set()
            self._holds[layer] = [0] * len(counts)
        for key in residents:
            self.residents[key.layer].add(key.expert)
        for key in holds:
            self.hold(key)
        self.used_bytes = sum(len(experts) * self._bytes[layer] for layer, experts in self.residents.items())

    def _excess(self) -> dict[int, int]:
        """Returns how many residents each layer has beyond its quota, without pinned ones."""
        return {
            layer: len(residents) - len(residents & self.pinned[layer]) - self.quotas[layer]
            for layer, residents in self.residents.items()
        }

    def _victim(self, layer: int, excess: Mapping[int, int], taken: Sequence[ExpertKey]) -> ExpertKey | None:
        """Returns the least used expert of the layer that is furthest beyond its quota.

        At equal excess this layer's goes, or an expert of the layer used last: its turn comes last again.
        """
        order = sorted(excess, key=lambda other: (-excess[other], other != layer, -self._last_use[other]))
        for other in order:
            for expert in reversed(self._needs[other].order):
                if self._may_go(key := ExpertKey(other, expert)) and key not in taken:
                    return key
        for other in order:
            for expert in sorted(self.pinned[other], key=self._needs[other].counts.__getitem__):
                if self._may_go(key := ExpertKey(other, expert)) and key not in taken:
                    return key
        return None

    def _may_go(self, key: ExpertKey) -> bool:
        return key.expert in self.residents[key.layer] and not self.is_held(key)

    def _review(self) -> None:
        self._review_interval = min(2 * self._review_interval, _LAST_REVIEW * len(self._needs))
        self._next_review = self._uses + self._review_interval
        if self._pinned_bytes:
            self.pinned = busiest(self._needs, self._bytes, self._pinned_bytes)
            for layer, experts in self.pinned.items():
                self._needs[layer].pin(experts)
        self._share()
        for need in self._needs.values():
            need.fade()

    def _share(self) -> None:
        pinned_bytes = sum(len(experts) * self._bytes[layer] for layer, experts in self.pinned.items())
        self.quotas = share_budget(self._needs, self._bytes, self.budget_bytes - pinned_bytes)


class LayerNeed:
    """The order and number of uses of one layer's experts."""

    def __init__(self, num_experts: int) -> None:
        self.order = list(range(num_experts))
        """Experts that are not pinned, those most worth keeping first."""
        self.counts = [0.0] * num_experts
        """Uses of each expert, older ones for less."""
        self._hits = [0.0] * num_experts
        self._scores = [0.0] * num_experts
        # Of a use now: it grows, instead of all earlier scores shrinking.
        self._weight = 1.0
        self._pinned: frozenset[int] = frozenset()

    def use(self, experts: Sequence[int]) -> None:
        """Notes that experts are used together."""
        # A prompt uses most experts of a layer at once, which does not tell which are worth keeping.
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
        # Stable: between equals, the last used is first. And one assignment: an interruption loses no expert.
        self.order = sorted(order, key=self._scores.__getitem__, reverse=True)

    def pin(self, experts: frozenset[int]) -> None:
        """Takes experts out of the order, and puts back those that are no longer pinned."""
        returning = sorted(self._pinned - experts)
        self.order, self._pinned = [expert for expert in self.order if expert not in experts] + returning, experts

    def gains(self) -> list[float]:
        """Returns the hits that the first, second ... resident brings, none more than the one before."""
        num = len(self.order)
        return _decreasing([hits + _PRIOR_HITS / (1 + place) for place, hits in enumerate(self._hits[:num])])

    def fade(self) -> None:
        """Makes earlier measurements count less than later ones."""
        self.counts = [count * _DECAY for count in self.counts]
        self._hits = [hits * _DECAY for hits in self._hits]


def share_budget(needs: Mapping[int, LayerNeed], expert_bytes: Mapping[int, int], budget_bytes: int) -> dict[int, int]:
    """Returns how many experts each layer should keep within a budget for all: those with the most hits per byte."""
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
    """Returns the experts of each layer with the most uses per byte within a budget for all."""
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
