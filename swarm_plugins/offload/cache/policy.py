"""Which experts stay in memory: within a budget, the least used one goes, whichever layer it is of.

Bookkeeping without tensors and reads, so that it is tested without weights. Eliseev and Mazur (2023, section 3.1) keep
a cache per layer and evict the least recently used expert. Counting uses, old ones for less, keeps more of what is
needed again; and one budget for all layers gives more of it to those that reuse more (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from swarm_plugins.offload.interfaces import ExpertKey

# A use counts half of one that comes so many uses of the layer later. Very small: the order of an LRU cache.
_HALF_LIFE = 16.0
_GROWTH = 2.0 ** (1.0 / _HALF_LIFE)
_MAX_WEIGHT = 1e100


class Residency:
    """Decides which experts are resident within a budget and which have to go."""

    def __init__(self, num_experts: Mapping[int, int], expert_bytes: Mapping[int, int], budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.residents: dict[int, set[int]] = {layer: set() for layer in num_experts}
        """The resident experts of each layer."""
        self._bytes = dict(expert_bytes)
        self._counts = {layer: UseCounts(count) for layer, count in num_experts.items()}
        self._holds = {layer: [0] * count for layer, count in num_experts.items()}
        self._num_uses = 0
        self._last_use = dict.fromkeys(num_experts, 0)

    def use(self, layer: int, experts: Sequence[int]) -> None:
        """Notes that experts of a layer are used together, resident or not."""
        self._counts[layer].use(experts)
        self._num_uses += 1
        self._last_use[layer] = self._num_uses

    def hold(self, key: ExpertKey) -> None:
        """Keeps an expert from being evicted, until `release` is called as often."""
        self._holds[key.layer][key.expert] += 1

    def release(self, key: ExpertKey) -> None:
        """Ends a `hold`."""
        self._holds[key.layer][key.expert] -= 1

    def is_held(self, key: ExpertKey) -> bool:
        return self._holds[key.layer][key.expert] > 0

    def admit(self, key: ExpertKey, *, is_guess: bool = False) -> list[ExpertKey] | None:
        """Makes an expert resident; returns those evicted to make room, or None if everything is held.

        ``is_guess`` tells whether it is read ahead; here that makes no difference.
        """
        missing = self.used_bytes + self._bytes[key.layer] - self.budget_bytes
        victims: list[ExpertKey] = []
        while missing > 0:
            victim = self._victim(key.layer, victims)
            if victim is None:
                return None
            victims.append(victim)
            missing -= self._bytes[victim.layer]
        for victim in victims:
            self.drop(victim)
        self._add(key)
        return victims

    def _add(self, key: ExpertKey) -> None:
        self.residents[key.layer].add(key.expert)
        self.used_bytes += self._bytes[key.layer]

    def drop(self, key: ExpertKey) -> None:
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

    def _victim(self, layer: int, taken: Collection[ExpertKey]) -> ExpertKey | None:
        """Returns the expert with the fewest uses per byte.

        Between equals this layer's goes, or an expert of the layer used last: its turn comes last again.
        """
        found: list[tuple[float, bool, int, ExpertKey]] = []
        for other, counts in self._counts.items():
            residents = self.residents[other]
            for expert in reversed(counts.order):
                # The cheapest question first: most experts of a large layer are not here.
                if expert in residents and self._may_go(key := ExpertKey(other, expert)) and key not in taken:
                    uses_per_byte = counts.uses(expert) / self._bytes[other]
                    found.append((uses_per_byte, other != layer, -self._last_use[other], key))
                    break
        return min(found)[-1] if found else None

    def _may_go(self, key: ExpertKey) -> bool:
        return key.expert in self.residents[key.layer] and not self.is_held(key)


class UseCounts:
    """How often the experts of one layer were used, older uses counting less."""

    def __init__(self, num_experts: int) -> None:
        self.order = list(range(num_experts))
        """The experts, the most used first; between equals, the last used first."""
        self._scores = [0.0] * num_experts
        # Of a use now: it grows, instead of all earlier scores shrinking.
        self._weight = 1.0

    def use(self, experts: Sequence[int]) -> None:
        """Notes that experts are used together."""
        self._weight *= _GROWTH
        if self._weight > _MAX_WEIGHT:
            self._scores = [score / self._weight for score in self._scores]
            self._weight = 1.0
        for expert in experts:
            self._scores[expert] += self._weight
        used = frozenset(experts)
        order = [*experts, *(expert for expert in self.order if expert not in used)]
        # Sorting is stable. And one assignment: an interruption loses no expert.
        self.order = sorted(order, key=self._scores.__getitem__, reverse=True)

    def uses(self, expert: int) -> float:
        """Returns the uses of an expert: 1 for a use just now, 1/2 for one sixteen uses of the layer ago."""
        return self._scores[expert] / self._weight
