"""Which experts stay in memory: the most used of each layer, the budget shared by need, the busiest pinned.

Pure bookkeeping, no tensors and no reading, so that it is tested without weights. A cache per layer is that of Eliseev
and Mazur (2023, section 3.1). Theirs evicts the least recently used expert; counting uses, old ones for less, keeps
more of what is needed again (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from swarm_plugins.offload.cache.needs import LayerNeed, busiest, share_budget
from swarm_plugins.offload.interfaces import ExpertKey

__all__ = ["Residency"]

# Layers used between two reviews of the quotas: first soon, then rarely.
_FIRST_REVIEW = 16
_LAST_REVIEW = 512


class Residency:
    """Decides who is resident and who has to go.

    Args:
        num_experts: Experts of each layer.
        expert_bytes: Size of an expert of each layer.
        budget_bytes: Bytes that all residents may have together.
        pinned_share: Share of the budget for the busiest experts, which are evicted only if nothing else can be.
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
        self._resident: dict[int, set[int]] = {layer: set() for layer in num_experts}
        self._holds = {layer: [0] * count for layer, count in num_experts.items()}
        self._pinned: dict[int, frozenset[int]] = dict.fromkeys(num_experts, frozenset())
        self.quotas: dict[int, int] = {}
        self._uses = 0
        self._last_use = dict.fromkeys(num_experts, 0)
        self._review_interval = _FIRST_REVIEW * len(self._needs)
        self._next_review = self._review_interval
        self._share()

    def is_resident(self, key: ExpertKey) -> bool:
        """Says whether an expert is resident."""
        return key.expert in self._resident[key.layer]

    def residents(self, layer: int) -> frozenset[int]:
        """Returns the resident experts of a layer."""
        return frozenset(self._resident[layer])

    def pinned(self, layer: int) -> frozenset[int]:
        """Returns the experts of a layer that eviction passes over."""
        return self._pinned[layer]

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
        """Says whether an expert must not be evicted now."""
        return self._holds[key.layer][key.expert] > 0

    def admit(self, key: ExpertKey) -> list[ExpertKey] | None:
        """Makes an expert resident.

        Returns:
            Who is no longer resident to make room; None, and nothing has changed, if there is no room because
            everything is held.
        """
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
        self._resident[key.layer].add(key.expert)
        self.used_bytes += self._bytes[key.layer]
        return victims

    def drop(self, key: ExpertKey) -> None:
        """Forgets a resident expert."""
        self._resident[key.layer].remove(key.expert)
        self.used_bytes -= self._bytes[key.layer]

    def restore(self, residents: Iterable[ExpertKey], holds: Iterable[ExpertKey]) -> None:
        """Takes over who is resident and who is held, after a change that was interrupted.

        Args:
            residents: Who is resident.
            holds: Who is held, once for each hold.
        """
        for layer, counts in self._holds.items():
            self._resident[layer] = set()
            self._holds[layer] = [0] * len(counts)
        for key in residents:
            self._resident[key.layer].add(key.expert)
        for key in holds:
            self.hold(key)
        self.used_bytes = sum(len(experts) * self._bytes[layer] for layer, experts in self._resident.items())

    def _excess(self) -> dict[int, int]:
        """Returns how many residents each layer has beyond its quota, pinned ones apart."""
        return {
            layer: len(residents) - len(residents & self._pinned[layer]) - self.quotas[layer]
            for layer, residents in self._resident.items()
        }

    def _victim(self, layer: int, excess: Mapping[int, int], taken: Sequence[ExpertKey]) -> ExpertKey | None:
        """Returns who goes first: the least used of the layer that is furthest beyond its quota.

        At equal excess it is this layer's, or the layer's that was used last: its turn comes last again.
        """
        order = sorted(excess, key=lambda other: (-excess[other], other != layer, -self._last_use[other]))
        for other in order:
            for expert in reversed(self._needs[other].order):
                if self._may_go(key := ExpertKey(other, expert)) and key not in taken:
                    return key
        for other in order:
            for expert in sorted(self._pinned[other], key=self._needs[other].counts.__getitem__):
                if self._may_go(key := ExpertKey(other, expert)) and key not in taken:
                    return key
        return None

    def _may_go(self, key: ExpertKey) -> bool:
        return key.expert in self._resident[key.layer] and not self._holds[key.layer][key.expert]

    def _review(self) -> None:
        self._review_interval = min(2 * self._review_interval, _LAST_REVIEW * len(self._needs))
        self._next_review = self._uses + self._review_interval
        if self._pinned_bytes:
            self._pinned = busiest(self._needs, self._bytes, self._pinned_bytes)
            for layer, experts in self._pinned.items():
                self._needs[layer].pin(experts)
        self._share()
        for need in self._needs.values():
            need.fade()

    def _share(self) -> None:
        pinned_bytes = sum(len(experts) * self._bytes[layer] for layer, experts in self._pinned.items())
        self.quotas = share_budget(self._needs, self._bytes, self.budget_bytes - pinned_bytes)
