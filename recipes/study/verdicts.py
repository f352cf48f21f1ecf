"""Intervals in words: a mean with its limits, and what they say about a claim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from recipes.study.intervals import Interval, t_interval

FEWEST_SEEDS = 3
"""Pairs below which nothing is shown, whatever the interval: two may agree by chance."""


def paired(better: Sequence[float], other: Sequence[float]) -> Interval:
    """Returns the mean of ``other - better`` over pairs, with Student's 95 % interval."""
    return t_interval([theirs - ours for ours, theirs in zip(better, other, strict=True)])


class Finding(StrEnum):
    """What an interval says about a claim that holds where the difference is positive."""

    SHOWN = "shown"
    NOT_SHOWN = "not shown"
    OPPOSITE = "the opposite"
    TOO_FEW = "not shown, too few pairs"


def finding(interval: Interval) -> Finding:
    """Returns ``SHOWN`` only if the whole interval is above zero."""
    if interval.count < FEWEST_SEEDS:
        return Finding.TOO_FEW
    if interval.is_above_zero:
        return Finding.SHOWN
    return Finding.OPPOSITE if interval.is_below_zero else Finding.NOT_SHOWN


def verdict(claim: str, interval: Interval, *, unit: str = "", digits: int = 4) -> str:
    """Returns the sentence on a claim that holds where a difference is positive: shown, not shown, or the opposite."""
    found = finding(interval).capitalize()
    return f"{found}: {claim} ({with_limits(interval, digits=digits)}{unit}, n = {interval.count})."


def with_limits(interval: Interval, *, digits: int = 4, sign: str = "+") -> str:
    """Returns mean and limits, as in ``+0.0012 (-0.0003 to +0.0027)``; a single value has no limits."""
    form = f"{sign}.{digits}f"
    limits = "unbounded" if math.isinf(interval.low) else f"{interval.low:{form}} to {interval.high:{form}}"
    return f"{interval.mean:{form}} ({limits})"


def plus_minus(values: Sequence[float], *, digits: int = 4, sign: str = "") -> str:
    """Returns the mean of values with half the width of Student's 95 % interval; a single value stands alone."""
    interval = t_interval(values)
    half = "" if math.isinf(interval.high) else f" ± {interval.high - interval.mean:.{digits}f}"
    return f"{interval.mean:{sign}.{digits}f}{half}"
