"""Experts read ahead: which layer they are for, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm_plugins.errors import CapacityError
from swarm_plugins.offload.counters import Counters
from swarm_plugins.offload.slots import Slot, Slots
from swarm_plugins.offload.types import ExpertKey

__all__ = ["Guesses"]


@dataclass(slots=True)
class _Guess:
    layer: int
    experts: Sequence[int]
    held: list[Slot] = field(default_factory=list)
    """What is kept from eviction until the layer has said what it needs."""
    loads: set[int] = field(default_factory=set)
    """Those of the experts that had to be read."""


class Guesses:
    """The guess for the next layer; its owner locks.

    Args:
        slots: The fast memory.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._planned: _Guess | None = None
        self._active: _Guess | None = None

    def plan(self, layer: int, experts: Sequence[int]) -> None:
        """Remembers a guess until what is needed before it has been asked of the disk."""
        self._planned = _Guess(layer, experts)

    def start(self) -> None:
        """Starts reading what was planned, as far as there is room beside what is in use."""
        guess, self._planned = self._planned, None
        if guess is None:
            return
        self.drop()
        self._active = guess
        present = self._slots.of(guess.layer)
        # First what is there already: reading the others must not evict it.
        for expert in sorted(guess.experts, key=lambda expert: expert not in present):
            if expert not in present:
                guess.loads.add(expert)
            try:
                slot = self._slots.fetch(ExpertKey(guess.layer, expert), is_guess=True)
            except CapacityError:
                # Whoever needs the expert will say so.
                slot = None
            if slot is None:
                return
            guess.held.append(slot)

    def held(self) -> list[Slot]:
        """Returns what the guess that is being read keeps from eviction."""
        return [] if self._active is None else self._active.held

    def settle(self, layer: int, experts: Sequence[int], counters: Counters) -> None:
        """Compares the guess with what a layer needs; what was guessed wrongly is no longer read.

        Args:
            layer: The layer that asks now.
            experts: What it asks for.
            counters: Where to count.
        """
        guess = self._active
        if guess is None:
            return
        needed = frozenset(experts) if guess.layer == layer else frozenset()
        if guess.layer == layer:
            slots = {slot.key.expert: slot for slot in guess.held}
            used = [expert for expert in guess.experts if expert in needed]
            counters.guesses += len(guess.experts)
            counters.guesses_used += len(used)
            counters.guesses_late += sum(expert in slots and not slots[expert].is_ready for expert in used)
            counters.guessed_loads += len(guess.loads)
            counters.guessed_loads_used += sum(expert in guess.loads for expert in used)
            counters.asked_after_guess += len(experts)
        else:
            counters.guesses += len(guess.experts)
            counters.guessed_loads += len(guess.loads)
        self._end(needed)

    def drop(self) -> bool:
        """Gives the guess up.

        Returns:
            Whether there was one, so that there may be room now.
        """
        had_guess = self._active is not None
        self._end(frozenset())
        return had_guess

    def _end(self, keep: frozenset[int]) -> None:
        guess, self._active = self._active, None
        if guess is None:
            return
        for slot in guess.held:
            self._slots.release(slot)
            if slot.key.expert not in keep:
                self._slots.cancel_guess(slot)
