"""How much to draft: running estimates of what a drafted token costs and brings.

A round drafts k tokens, verifies them in one trip and gains 1 to k + 1 tokens. Among all rules for stopping a draft,
the one with the most tokens per second goes on while some number of further tokens is expected to bring more than their
time brings elsewhere (Dinkelbach's condition for the best ratio of two means, with the rate that was reached so far).
For a constant acceptance it gives the k that maximizes the expected tokens over time of Leviathan, Kalman and Matias
(2023), theorem 3.8, with a measured trip instead of a free one.

A trip's time is taken to grow with the square root of its tokens: in mixtures of experts the first ones cost most,
as each reads experts of its own, and later ones share them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

_KEPT = 0.9
"""Weight of what was known, each time that something new is seen."""
_KEPT_ACCEPTANCE = 0.98
"""The same for acceptance and yield, also of each round: what failed long ago is tried again."""
_NUM_BINS = 10
_PRIOR_TOKENS = 2.0
"""Drafted tokens that the first guess of an acceptance counts as."""
_PRIOR_YIELD = 0.7
_PRIOR_SLOPE = 0.1
"""First guess of how much longer a trip is with four tokens than with one, as a share of it."""
_RIDGE = 0.02
_LOOK_AHEAD = 9
"""Numbers of further tokens that are considered."""
_FIRST_TOKENS = 4
"""Drafted at most before any time is known, and after a round in which drafting did not pay."""
_VARIED = 8
"""One round in so many is shorter if all were alike: from equal ones, the time of a token cannot be known."""
_UNIFORM = 0.05
"""Variance of the root of widths below which these count as equal."""
_HOPE = 0.97
"""With each round in which a draft did not pay, one seems cheaper by this: what was slow once is tried again."""
_OUTLIER = 4.0
"""A time counts as at most so many times the mean: one late answer says little about the next."""


@dataclass
class Counts:
    """What speculation did, over all calls."""

    rounds: int = 0
    """Trips through the chain."""
    tokens: int = 0
    """New tokens of all rows."""
    row_rounds: int = 0
    """Rounds times the rows that were not finished."""
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_round(self) -> float:
        """New tokens of a row in a trip; 0.0 before the first."""
        return self.tokens / self.row_rounds if self.row_rounds else 0.0

    def __str__(self) -> str:
        share = f", {self.accepted / self.drafted:.0%} of {self.drafted} drafted ones accepted" if self.drafted else ""
        return f"{self.tokens} tokens in {self.rounds} rounds: {self.tokens_per_round:.2f} a round{share}"


class _Mean:
    """A mean that forgets."""

    def __init__(self, kept: float = _KEPT) -> None:
        self._kept = kept
        self._sum = self._weight = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        self.fade()
        self._sum += value
        self._weight += weight

    def fade(self) -> None:
        """Counts for less."""
        self._sum *= self._kept
        self._weight *= self._kept

    def value(self) -> float | None:
        """Returns the mean; None before the first value."""
        return self._sum / self._weight if self._weight else None

    def with_guess(self, guess: float) -> float:
        """Returns the mean of the values and a first guess, which counts as a few of them."""
        return (self._sum + _PRIOR_TOKENS * guess) / (self._weight + _PRIOR_TOKENS)


class Pace:
    """Measured times and acceptance, and the decisions that follow from them."""

    def __init__(self) -> None:
        self._bins = [_Mean(_KEPT_ACCEPTANCE) for _ in range(_NUM_BINS)]
        """Acceptance by the draft's confidence."""
        self._yield = _Mean(_KEPT_ACCEPTANCE)
        """Tokens that a pass of the draft brought: 0 also for one that was not worth verifying."""
        self._draft_s = _Mean()
        self._rate = _Mean()
        self._trips = _Line()
        self._hope = 1.0
        self._is_declined = False
        """Whether a draft did not pay in this round."""
        self._num_rounds = 0

    def limit(self, most: int) -> int:
        """Returns how many tokens to draft at most, if no more than ``most`` are of use."""
        self._is_declined = False
        if self._rate.value() is None or self._hope < 1.0:
            return min(most, _FIRST_TOKENS)
        self._num_rounds += 1
        is_short = self._num_rounds % _VARIED == 0 and self._trips.is_uniform()
        return min(most, int(self._trips.width()) // 2) if is_short else most

    def acceptance(self, confidence: float) -> float:
        """Returns the chance that a token of this confidence is accepted, if those before it are."""
        index = _bin(confidence)
        return self._bins[index].with_guess((index + 0.5) / _NUM_BINS)

    def pays_to_draft(self, chances: float, drafted: int) -> bool:
        """Returns whether to draft on.

        Args:
            chances: Sum over the rows of the chance that all tokens so far are accepted.
            drafted: Tokens so far.
        """
        return self._pays(chances, drafted, known=0)

    def pays_to_verify(self, chances: float, drafted: int) -> bool:
        """Returns whether to verify one more token that is drafted already.

        Args:
            chances: Sum over the rows of the chance that it, and all before it, are accepted.
            drafted: Tokens before it.
        """
        return self._pays(chances, drafted, known=1)

    def _pays(self, chances: float, drafted: int, *, known: int) -> bool:
        """Returns whether some number of further tokens, ``known`` of them drafted, is worth its time."""
        price = (self._rate.value() or 0.0) * self._hope
        share, draft_s = self._yield.with_guess(_PRIOR_YIELD), self._draft_s.value() or 0.0
        gain, chance = known * chances, chances
        for more in range(1 - known, _LOOK_AHEAD):
            if more:
                chance *= share
                gain += chance
            if gain > price * (more * draft_s + self._trips.longer_s(1 + drafted, known + more)):
                return True
        self._is_declined = True
        return False

    def saw_waste(self) -> None:
        """Records a pass of the draft model whose token is not worth verifying."""
        self._yield.add(0.0)
        self._is_declined = False  # it was tried, and its price is in this round's time

    def saw_draft(self, tokens: int, seconds: float) -> None:
        """Records the time of ``tokens`` forward passes of the draft model."""
        if tokens:
            usual_s = self._draft_s.value()
            self._draft_s.add(seconds if usual_s is None else min(seconds, _OUTLIER * usual_s * tokens), tokens)

    def saw_round(self, width: int, trip_s: float, total_s: float, tokens: int) -> None:
        """Records a round.

        Args:
            width: Tokens of a row that were verified.
            trip_s: Seconds of the verification.
            total_s: Seconds of the whole round.
            tokens: New tokens of all rows.
        """
        usual_s = self._trips.mean()
        capped_s = trip_s if usual_s is None else min(trip_s, _OUTLIER * usual_s)
        self._trips.add(width, capped_s)
        self._rate.add(tokens, total_s - trip_s + capped_s)
        self._hope = _HOPE * self._hope if width == 1 and self._is_declined else 1.0
        for acceptance in (*self._bins, self._yield):
            acceptance.fade()

    def saw_tokens(self, confidences: Sequence[float], accepted: int) -> None:
        """Records which drafted tokens of a row were accepted: the first ones, and no later one was tested."""
        for place, confidence in enumerate(confidences[: accepted + 1]):
            is_accepted = float(place < accepted)
            self._bins[_bin(confidence)].add(is_accepted)
            self._yield.add(is_accepted)


class _Line:
    """The times of trips by the root of their width, as a line of least squares that forget."""

    def __init__(self) -> None:
        self._root, self._seconds = _Mean(), _Mean()
        self._square, self._product = _Mean(), _Mean()
        self._last_slope: float | None = None
        """When widths differed last."""

    def add(self, width: int, seconds: float) -> None:
        root = math.sqrt(width)
        self._root.add(root)
        self._seconds.add(seconds)
        self._square.add(width)
        self._product.add(root * seconds)
        if not self.is_uniform():
            self._last_slope = self.slope()

    def mean(self) -> float | None:
        return self._seconds.value()

    def width(self) -> float:
        return (self._root.value() or 0.0) ** 2

    def is_uniform(self) -> bool:
        """Returns whether widths hardly differ."""
        return self._moments()[0] < _UNIFORM

    def longer_s(self, width: int, more: int) -> float:
        """Returns how much longer a trip of ``width`` tokens takes with some more."""
        return self.slope() * (math.sqrt(width + more) - math.sqrt(width))

    def slope(self) -> float:
        """Returns the seconds of a unit of the root; a ridge keeps it near what is known where widths hardly differ."""
        variance, covariance = self._moments()
        guess = _PRIOR_SLOPE * (self.mean() or 0.0) if self._last_slope is None else self._last_slope
        return max(0.0, (covariance + _RIDGE * guess) / (variance + _RIDGE))

    def _moments(self) -> tuple[float, float]:
        root, seconds = self._root.value() or 0.0, self.mean() or 0.0
        square, product = self._square.value() or 0.0, self._product.value() or 0.0
        return square - root * root, product - root * seconds


def _bin(confidence: float) -> int:
    return min(int(confidence * _NUM_BINS), _NUM_BINS - 1)


def sum_of(chances: Tensor, active: Tensor) -> float:
    """Returns the sum of the chances of the rows that are not finished."""
    return float(chances[active].sum())
