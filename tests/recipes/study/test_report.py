from __future__ import annotations

import pytest

from recipes.study.arms import CLAIMS, Claim
from recipes.study.report import MISSING, NOT_SHOWN, OPPOSITE, SHOWN, TOO_FEW, judge

CLAIM = Claim("new beats old", "new", "old", "4.1")
KEEPS_HALF = Claim("new keeps half of big's gain over old", "new", "big", "4.1", "old")


def losses(**arms: list[float]) -> dict[str, dict[str, float]]:
    return {arm: {str(seed): value for seed, value in enumerate(values)} for arm, values in arms.items()}


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        pytest.param([1.30, 1.31, 1.29], SHOWN, id="clearly-better"),
        pytest.param([1.39, 1.41, 1.30], NOT_SHOWN, id="better-on-average-but-the-interval-includes-zero"),
        pytest.param([1.40, 1.40, 1.40], NOT_SHOWN, id="equal"),
        pytest.param([1.50, 1.51, 1.49], OPPOSITE, id="clearly-worse"),
        pytest.param([1.0], TOO_FEW, id="one-seed-shows-nothing"),
        pytest.param([1.3, 1.3], TOO_FEW, id="two-seeds-that-agree-show-nothing"),
        pytest.param([], MISSING, id="no-seed"),
    ],
)
def test_verdicts(new: list[float], verdict: str) -> None:
    assert judge(CLAIM, losses(new=new, old=[1.40, 1.40, 1.40])).verdict == verdict


def test_differences_are_paired_by_seed() -> None:
    # The seeds differ far more than the arms; in every seed, the new arm is better by about 0.1.
    outcome = judge(CLAIM, losses(new=[1.0, 2.0, 3.0], old=[1.11, 2.10, 3.09]))
    assert outcome.verdict == SHOWN
    assert outcome.difference is not None
    assert outcome.difference.mean == pytest.approx(0.1)


def test_only_seeds_of_all_arms_count() -> None:
    outcome = judge(CLAIM, losses(new=[1.0, 1.0], old=[1.1, 1.1, 5.0]))
    assert outcome.difference is not None
    assert (outcome.difference.count, outcome.difference.mean) == (2, pytest.approx(0.1))


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        pytest.param([1.22, 1.23, 1.21], SHOWN, id="keeps-nearly-all"),
        pytest.param([1.30, 1.31, 1.29], NOT_SHOWN, id="keeps-half"),
        pytest.param([1.38, 1.39, 1.37], OPPOSITE, id="keeps-little"),
    ],
)
def test_as_good_as_is_measured_by_the_gain(new: list[float], verdict: str) -> None:
    outcome = judge(KEEPS_HALF, losses(new=new, big=[1.2] * 3, old=[1.4] * 3))
    assert outcome.verdict == verdict


def test_without_a_gain_there_is_nothing_to_keep() -> None:
    assert judge(KEEPS_HALF, losses(new=[1.4] * 3, big=[1.4] * 3, old=[1.4] * 3)).verdict == NOT_SHOWN
    worse_than_old = losses(new=[1.2, 1.21, 1.19], big=[1.6] * 3, old=[1.0] * 3)
    assert judge(KEEPS_HALF, worse_than_old).verdict == OPPOSITE


def test_claims_have_different_names_and_sources() -> None:
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    assert all(claim.source for claim in CLAIMS)
