"""Experts read ahead: which layers they are for, and whether they were used."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from swarm_plugins.errors import CapacityError
from swarm_plugins.offload.cache.slots import Slot, Slots
from swarm_plugins.offload.interfaces import ExpertKey
from swarm_plugins.offload.stats import OffloadStats


@dataclass(slots=True)
class _Guess:
    layer: int
    experts: Sequence[int] = ()
    held: list[Slot] = field(default_factory=list)
    """Kept from eviction until the layer has asked for what it needs."""
    loads: set[int] = field(default_factory=set)
    """Experts that had to be read, earlier guesses for the layer included."""


class Guesses:
    """The guesses for the layers that come next; their owner locks.

    A layer is guessed again as it comes nearer: experts that the better guess dropped are no longer read.
    """

    def __init__(self, slots: Slots, stats: OffloadStats) -> None:
        self._slots = slots
        self._stats = stats
        self._planned: dict[int, Sequence[int]] = {}
        self._active: dict[int, _Guess] = {}

    def plan(self, layer: int, experts: Sequence[int]) -> None:
        """Remembers a guess until everything needed before it has been asked of the disk.

        Several layers' guesses are read in the order of the calls.
        """
        self._planned.pop(layer, None)
        self._planned[layer] = experts

    def start(self) -> None:
        """Starts reading planned guesses, as far as experts in use leave room."""
        planned, self._planned = self._planned, {}
        for layer, experts in planned.items():
            guess = self._active.setdefault(layer, _Guess(layer))
            if not experts:
                # All of the layer is there or on its way, perhaps thanks to the guess before, which stays.
                continue
            self._let_go(guess, keep=experts)
            guess.experts = experts
            if not self._fetch(guess):
                return

    def held(self) -> list[Slot]:
        """Returns the slots that active guesses keep from eviction."""
        return [slot for guess in self._active.values() for slot in guess.held]

    def settle(self, layer: int, experts: Sequence[int]) -> None:
        """Compares the guess for a layer with what it asks for; wrongly guessed experts are no longer read.

        If the layer was not guessed, all guesses are given up.
        """
        self._planned.pop(layer, None)
        stats, guess = self._stats, self._active.get(layer)
        if guess is None:
            for other in self._active.values():
                stats.guesses += len(other.experts)
                stats.guessed_loads += len(other.loads)
            self.drop()
            return
        needed = frozenset(experts)
        slots = {slot.key.expert: slot for slot in guess.held}
        used = [expert for expert in guess.experts if expert in needed]
        stats.guesses += len(guess.experts)
        stats.guesses_used += len(used)
        stats.guesses_late += sum(expert in slots and not slots[expert].is_ready for expert in used)
        stats.guessed_loads += len(guess.loads)
        stats.guessed_loads_used += len(guess.loads & needed)
        # A layer that is all in memory is not guessed.
        stats.asked_after_guess += len(experts) if guess.experts else 0
        del self._active[layer]
        self._let_go(guess, keep=needed)
        for slot in guess.held:
            self._slots.release(slot)

    def drop(self) -> bool:
        """Gives up all guesses; returns whether there was one, so that there may be room now."""
        dropped, self._active = self._active, {}
        for guess in dropped.values():
            self._let_go(guess, keep=())
        return bool(dropped)

    def _fetch(self, guess: _Guess) -> bool:
        """Holds the guessed experts and starts reading missing ones; returns whether there was room for all."""
        present = self._slots.of(guess.layer)
        held = {slot.key.expert for slot in guess.held}
        # First those that are there already: reading the others must not evict them.
        for expert in sorted(guess.experts, key=lambda expert: expert not in present):
            if expert in held:
                continue
            if expert not in present:
                guess.loads.add(expert)
            try:
                slot = self._slots.fetch(ExpertKey(guess.layer, expert), is_guess=True)
            except CapacityError:
                # A layer that needs the expert will raise it.
                slot = None
            if slot is None:
                return False
            guess.held.append(slot)
        return True

    def _let_go(self, guess: _Guess, keep: Collection[int]) -> None:
        """Gives back what a guess holds, except some experts, and stops reads that have not become needed."""
        for slot in [slot for slot in guess.held if slot.key.expert not in keep]:
            guess.held.remove(slot)
            self._slots.release(slot)
            self._slots.cancel_guess(slot)
