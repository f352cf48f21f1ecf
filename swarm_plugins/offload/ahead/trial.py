"""Tries out whether guessing pays: now and then a few tokens against those around them. Pure bookkeeping."""

from __future__ import annotations

import math
import statistics

# Passes of a kind in a row, as a guess of the last pass still helps or hurts the next one.
_BLOCK = 4
# In a trial, one block of so many, in the middle, does the opposite: usually the slower kind, so just one.
_BLOCKS = 7
# Each round of blocks gives one comparison: changes over seconds, as of disks, affect both its sides.
_FEWEST_COMPARED = 5
_MOST_COMPARED = 12
# Differences of this many standard errors are trusted.
_CERTAIN = 2.5
# Passes to the next trial: few at first, as caches are still filling.
_FIRST_REST = 64
_LAST_REST = 2048


class PayTrial:
    """Decides, pass by pass, whether to guess: by comparing times of passes with and without.

    A pass is one token through all layers. While a trial runs, some passes do the opposite; then the faster kind is
    used for a while, twice as long each time a trial confirms it.
    """

    def __init__(self) -> None:
        self.is_paying = True
        """The result of the last trial."""
        self._is_on = True
        self._rest = _FIRST_REST // 4
        """Passes until the next trial; 0 during one."""
        self._next_rest = _FIRST_REST
        self._place = 0
        self._samples: dict[bool, list[float]] = {True: [], False: []}
        self._gains: list[float] = []
        self._began_s: float | None = None

    def begin_pass(self, now_s: float, *, is_decode: bool) -> bool:
        """Notes that a pass begins, which ends the one before, and returns whether to guess in it.

        Only decoding passes, of few tokens, are compared.
        """
        began, self._began_s = self._began_s, now_s if is_decode else None
        if not is_decode or began is None:
            return self._is_on
        if self._rest:
            self._rest -= 1
            self._is_on = self.is_paying
            if not self._rest:
                self._place = 0
                self._gains = []
                self._samples = {True: [], False: []}
            return self._is_on
        # The first pass of a block still uses what the block before left in memory.
        if self._place % _BLOCK:
            self._samples[self._is_on].append(now_s - began)
        self._place += 1
        is_other = self._place // _BLOCK % _BLOCKS == _BLOCKS // 2
        self._is_on = self.is_paying != is_other
        if self._place % (_BLOCK * _BLOCKS) == 0:
            self._judge()
        return self._is_on

    def _judge(self) -> None:
        samples, self._samples = self._samples, {True: [], False: []}
        if not all(samples.values()):
            # Another thread running the same model has just judged.
            return
        on_s, off_s = (statistics.median(samples[kind]) for kind in (True, False))
        self._gains.append(off_s - on_s)
        if len(self._gains) < _FEWEST_COMPARED:
            return
        gain, error = statistics.median(self._gains), _standard_error(self._gains)
        is_certain = abs(gain) > _CERTAIN * error
        if not is_certain and len(self._gains) < _MOST_COMPARED:
            return
        # Indistinguishable: stays as it is.
        pays = gain > 0 if is_certain else self.is_paying
        self._next_rest = min(2 * self._next_rest, _LAST_REST) if pays == self.is_paying else _FIRST_REST
        self.is_paying = self._is_on = pays
        self._rest = self._next_rest


def _standard_error(samples: list[float]) -> float:
    """Returns the standard error of the median, from the middle half: pauses of the caller count little."""
    lower, _, upper = statistics.quantiles(samples, n=4)
    return 1.25 * (upper - lower) / 1.35 / math.sqrt(len(samples))
