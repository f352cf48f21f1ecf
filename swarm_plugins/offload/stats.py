"""Statistics of the cache: hits, reads, guesses, and time spent waiting. The cache counts in one, and gives copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class OffloadStats:
    """Counts since the model was loaded. An expert counts once per call of its layer, for any number of tokens.

    Attributes:
        hits: Experts in fast memory when they were asked for, including those that a guess brought in time.
        misses: Experts that had to be waited for.
        bytes_read: Bytes taken from disk, including for guesses.
        guesses: Experts guessed: read ahead, or found in memory and kept until their layer had asked.
        guesses_used: Guessed experts that their layer asked for.
        guesses_late: Used guesses that were still being read.
        guessed_loads: Guessed experts that were not in memory, so that a read was started or planned.
        guessed_loads_used: Such reads that their layer asked for.
        asked_after_guess: Experts that a layer asked for after a guess for it, guessed or not.
        stall_s: Seconds spent waiting for experts.
        seconds: Seconds from the first call to the end of the last.
        tokens: Rows that went through the first layer with experts.
        passes: Calls of the first layer with experts.
        uses: How often each expert was asked for: layer -> one count per expert.
    """

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    guesses: int = 0
    guesses_used: int = 0
    guesses_late: int = 0
    guessed_loads: int = 0
    guessed_loads_used: int = 0
    asked_after_guess: int = 0
    stall_s: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    passes: int = 0
    uses: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def hit_ratio(self) -> float:
        """Share of the experts that were in fast memory when asked for; 0 if none was asked for."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def recall(self) -> float:
        """Share of the experts asked for that had been guessed, where there was a guess (the paper's section 3.2)."""
        return self.guesses_used / max(1, self.asked_after_guess)

    @property
    def waste(self) -> float:
        """Share of the guessed reads that were not used."""
        return 1 - self.guessed_loads_used / self.guessed_loads if self.guessed_loads else 0.0
