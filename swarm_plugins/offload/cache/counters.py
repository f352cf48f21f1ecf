"""Counts what the cache does, as it does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swarm_plugins.offload.stats import OffloadStats


class Counters:
    """Running counts, named as in `OffloadStats`; its owner locks."""

    def __init__(self, num_experts: Mapping[int, int]) -> None:
        self._first_layer = min(num_experts, default=0)
        self.hits = self.misses = self.bytes_read = self.passes = self.tokens = 0
        self.guesses = self.guesses_used = self.guesses_late = 0
        self.guessed_loads = self.guessed_loads_used = self.asked_after_guess = 0
        self.stall_s = 0.0
        self.first_s: float | None = None
        self.last_s = 0.0
        self._uses = {layer: [0] * count for layer, count in num_experts.items()}

    def use(self, layer: int, experts: Sequence[int], num_missing: int, now_s: float) -> None:
        """Counts one call of a layer."""
        if layer == self._first_layer:
            self.passes += 1
        if self.first_s is None:
            self.first_s = now_s
        self.misses += num_missing
        self.hits += len(experts) - num_missing
        uses = self._uses[layer]
        for expert in experts:
            uses[expert] += 1

    def stats(self) -> OffloadStats:
        counts = {name: value for name, value in vars(self).items() if name in OffloadStats.__slots__}
        return OffloadStats(
            **counts,
            seconds=max(0.0, self.last_s - self.first_s) if self.first_s is not None else 0.0,
            uses={layer: tuple(counts) for layer, counts in self._uses.items()},
        )
