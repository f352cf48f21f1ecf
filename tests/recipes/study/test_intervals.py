from __future__ import annotations

import math

import pytest

from recipes.study.intervals import ratio_interval, t_cdf, t_interval, t_quantile, welch_interval


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [
        # Abramowitz and Stegun, table 26.10
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.975, 4, 2.776),
        (0.975, 5, 2.571),
        (0.975, 9, 2.262),
        (0.975, 30, 2.042),
        (0.95, 2, 2.920),
        (0.995, 7, 3.499),
    ],
)
def test_quantiles_are_those_of_the_table(probability: float, degrees: int, expected: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("degrees", range(1, 12))
def test_the_distribution_is_symmetric_and_its_quantile_inverts_it(degrees: int) -> None:
    assert t_cdf(0.0, degrees) == pytest.approx(0.5)
    assert t_cdf(1.3, degrees) + t_cdf(-1.3, degrees) == pytest.approx(1)
    assert t_cdf(t_quantile(0.9, degrees), degrees) == pytest.approx(0.9)


def test_interval_of_three_values() -> None:
    found = t_interval([1.0, 2.0, 3.0])
    half = 4.302653 / math.sqrt(3)
    assert (found.mean, found.count) == (2.0, 3)
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half))
    assert not found.is_above_zero
    assert not found.is_below_zero


def test_equal_values_leave_no_doubt() -> None:
    found = t_interval([-0.5, -0.5, -0.5])
    assert found.is_below_zero
    assert (found.low, found.high) == pytest.approx((-0.5, -0.5))


def test_one_value_bounds_nothing() -> None:
    found = t_interval([7.0])
    assert (found.low, found.high) == (-math.inf, math.inf)


@pytest.mark.parametrize(("probability", "degrees"), [(0.4, 3), (1.0, 3), (0.9, 0)])
def test_impossible_quantiles_are_refused(probability: float, degrees: int) -> None:
    with pytest.raises(ValueError, match=rf"got {probability} and {degrees}"):
        t_quantile(probability, degrees)


def test_the_interval_of_values_that_are_no_pairs() -> None:
    found = welch_interval([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    half = 2.776445 * math.sqrt(2 / 3)  # of equal variances: four degrees of freedom
    assert (found.mean, found.count) == (-3.0, 3)
    assert (found.low, found.high) == pytest.approx((-3 - half, -3 + half))
    # Without a variance of their own, the others only move the mean.
    alone, moved = t_interval([1.0, 2.0, 3.0]), welch_interval([1.0, 2.0, 3.0], [0.5, 0.5])
    assert (moved.low, moved.high) == pytest.approx((alone.low - 0.5, alone.high - 0.5))
    assert welch_interval([1.0], [0.0, 0.5]).low == -math.inf


def test_the_interval_of_a_ratio() -> None:
    values = [9.0, 10.0, 11.0]
    # Where one side has no variance, it is Student's interval of the other.
    mine = t_interval(values)
    over = ratio_interval(values, [2.0, 2.0])
    assert (over.mean, over.low, over.high) == pytest.approx((5.0, mine.low / 2, mine.high / 2))
    under = ratio_interval([2.0, 2.0], values)
    assert (under.mean, under.low, under.high) == pytest.approx((0.2, 2 / mine.high, 2 / mine.low))
    both = ratio_interval(values, [1.0, 2.0, 1.5])
    for factor, covers in ((both.low, True), (0.999 * both.low, False), (both.high, True), (1.001 * both.high, False)):
        difference = welch_interval(values, [factor * one for one in (1.0, 2.0, 1.5)])
        assert (difference.low <= 0 <= difference.high) == covers
    for unbounded in (ratio_interval([1.0], values), ratio_interval(values, [0.1, 5.0, 0.1])):
        assert (unbounded.low, unbounded.high) == (-math.inf, math.inf)
