"""Means of differences, paired or not, with their t-intervals, without tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and the interval that covers the true one with the given confidence."""

    mean: float
    low: float
    high: float
    count: int

    @property
    def is_above_zero(self) -> bool:
        """Whether the whole interval is: what a claim of a positive difference needs."""
        return self.low > 0

    @property
    def is_below_zero(self) -> bool:
        """Whether the whole interval is: the opposite was found."""
        return self.high < 0


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Returns the mean of independent values with Student's interval; unbounded for a single one.

    Raises:
        ValueError: If there are none.
    """
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    half = t_quantile((1 + confidence) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, len(values))


def welch_interval(values: Sequence[float], others: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Returns the difference of two unpaired means; unbounded if either has a single value.

    Welch's interval, with its degrees of freedom rounded down; ``count`` is the smaller sample's.

    Raises:
        ValueError: If there are none.
    """
    mean, count = statistics.fmean(values) - statistics.fmean(others), min(len(values), len(others))
    if count == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    errors = [statistics.variance(one) / len(one) for one in (values, others)]
    total = sum(errors)
    if total == 0:
        return Interval(mean, mean, mean, count)
    shares = (error**2 / (len(one) - 1) for error, one in zip(errors, (values, others), strict=True))
    half = t_quantile((1 + confidence) / 2, max(1, int(total**2 / sum(shares)))) * math.sqrt(total)
    return Interval(mean, mean - half, mean + half, count)


def ratio_interval(values: Sequence[float], others: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Returns the ratio of two unpaired positive means; unbounded if either has a single value.

    It covers the ratios ``r`` for which `welch_interval` of ``values`` and ``r * others`` covers zero (Fieller 1954).

    Raises:
        ValueError: If there are none.
    """
    ratio, count = statistics.fmean(values) / statistics.fmean(others), min(len(values), len(others))

    def difference(r: float) -> Interval:
        return welch_interval(values, [r * one for one in others], confidence)

    def limit(inside: float, outside: float, is_inside: Callable[[Interval], bool]) -> float:
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if is_inside(difference(middle)) else (inside, middle)
        return inside

    most = 1000 * ratio
    if count == 1 or not difference(0.0).is_above_zero or not difference(most).is_below_zero:
        return Interval(ratio, -math.inf, math.inf, count)
    low = limit(ratio, 0.0, lambda one: not one.is_above_zero)
    return Interval(ratio, low, limit(ratio, most, lambda one: not one.is_below_zero), count)


def t_quantile(probability: float, degrees: int) -> float:
    """Returns the value below which Student's t lies with a probability of one half or more.

    Raises:
        ValueError: If the probability is not in ``[0.5, 1)`` or the degrees of freedom are not positive.
    """
    if not 0.5 <= probability < 1 or degrees < 1:
        raise ValueError(f"expected a probability in [0.5, 1) and degrees above 0, got {probability} and {degrees}")
    low, high = 0.0, 1.0
    while t_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, degrees) < probability else (low, middle)
    return high


def t_cdf(value: float, degrees: int) -> float:
    """Returns the probability that Student's t is below a value, by its finite sum for whole degrees of freedom.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(value / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    if degrees % 2:
        term, total = cosine, (cosine if degrees > 1 else 0.0)
        for index in range(3, degrees - 1, 2):
            term *= cosine**2 * (index - 1) / index
            total += term
        within = 2 / math.pi * (angle + sine * total)
    else:
        term = total = 1.0
        for index in range(2, degrees - 1, 2):
            term *= cosine**2 * (index - 1) / index
            total += term
        within = sine * total
    return (1 + within) / 2
