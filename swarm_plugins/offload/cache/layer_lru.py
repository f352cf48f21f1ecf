"""The offloading paper's own policy (Eliseev and Mazur 2023, sections 3.1 and 3.2), to compare with.

Each layer keeps the same number of experts, and the one whose last use is longest ago makes room. Experts that are
read ahead go to a few buffers of their own and replace nothing; one that is then used changes places with its layer's
oldest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from swarm_plugins.errors import CapacityError
from swarm_plugins.offload.cache.budget import all_bytes, holds_all
from swarm_plugins.offload.cache.policy import Residency
from swarm_plugins.offload.interfaces import ExpertKey

NUM_STAGED = 4
"""Buffers for experts that are read ahead: the paper's ``b``."""


class LayerLru(Residency):
    """Keeps ``num_per_layer`` experts of each layer, the last used, and `NUM_STAGED` others; all if there is room.

    Raises:
        CapacityError: If the budget has no room for one expert of each layer besides the staged ones, nor for all.
    """

    def __init__(self, num_experts: Mapping[int, int], expert_bytes: Mapping[int, int], budget_bytes: int) -> None:
        super().__init__(num_experts, expert_bytes, budget_bytes)
        staged, one_each = NUM_STAGED * max(expert_bytes.values(), default=0), sum(expert_bytes.values())
        if holds_all(budget_bytes, expert_bytes, num_experts):
            # Then nothing makes room for what is read ahead.
            self.num_per_layer = max(num_experts.values(), default=0)
        else:
            self.num_per_layer = (budget_bytes - staged) // one_each
        if self.num_per_layer < 1 and num_experts:
            raise CapacityError(
                f'policy="lru" with {budget_bytes} bytes: one expert of each of {len(num_experts)} layers and '
                f"{NUM_STAGED} that are read ahead take {one_each + staged}, all experts "
                f"{all_bytes(expert_bytes, num_experts)}; raise fast_bytes, take a lower expert_bits, or "
                'policy="counting"'
            )
        self._kept: dict[int, list[int]] = {layer: [] for layer in num_experts}
        """The layers' experts, the last used at the end."""
        self._staged: list[ExpertKey] = []
        """Read ahead, or replaced by one that was, the oldest first."""

    def use(self, layer: int, experts: Sequence[int]) -> None:
        kept = self._kept[layer]
        for expert in experts:
            key = ExpertKey(layer, expert)
            if expert in kept:
                kept.remove(expert)
            elif key in self._staged:
                self._staged.remove(key)
                if len(kept) >= self.num_per_layer:
                    # First in line to go, whichever buffer it is in.
                    self._staged.insert(0, ExpertKey(layer, kept.pop(0)))
            else:
                continue
            kept.append(expert)

    def admit(self, key: ExpertKey, *, is_guess: bool = False) -> list[ExpertKey] | None:
        kept = self._kept[key.layer]
        is_staged, victims = is_guess, list[ExpertKey]()
        if not is_guess and len(kept) >= self.num_per_layer:
            victims = [one for expert in kept if not self.is_held(one := ExpertKey(key.layer, expert))][:1]
            # All are in use: this one is used and goes.
            is_staged = not victims
        if is_staged and len(self._staged) >= NUM_STAGED:
            victims = [one for one in self._staged if not self.is_held(one)][:1]
            if not victims:
                return None
        for victim in victims:
            self.drop(victim)
        if is_staged:
            self._staged.append(key)
        else:
            kept.append(key.expert)
        self._add(key)
        return victims

    def drop(self, key: ExpertKey) -> None:
        super().drop(key)
        if key in self._staged:
            self._staged.remove(key)
        else:
            self._kept[key.layer].remove(key.expert)

    def restore(self, residents: Iterable[ExpertKey], holds: Iterable[ExpertKey]) -> None:
        super().restore(residents, holds)
        self._staged = [key for key in dict.fromkeys(self._staged) if key.expert in self.residents[key.layer]]
        for layer, known in self._kept.items():
            own = {expert for expert in self.residents[layer] if ExpertKey(layer, expert) not in self._staged}
            self._kept[layer] = [*sorted(own.difference(known)), *(one for one in dict.fromkeys(known) if one in own)]
