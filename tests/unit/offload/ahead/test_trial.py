"""Guessing goes on where it pays and stops where it does not, whatever else takes time."""

from __future__ import annotations

import random

import pytest

from swarm_plugins.offload.ahead.trial import PayTrial


def run(
    on_s: float, off_s: float, num_passes: int, *, noise: float = 0.05, trial: PayTrial | None = None
) -> list[bool]:
    """Returns for each pass whether it was guessed in, for passes that take so long with and without."""
    draw, trial, now, kinds = random.Random(0), trial or PayTrial(), 0.0, []
    for _ in range(num_passes):
        kinds.append(trial.begin_pass(now, is_decode=True))
        now += (on_s if kinds[-1] else off_s) * draw.uniform(1 - noise, 1 + noise)
    return kinds


def test_guesses_are_made_until_there_is_a_measure() -> None:
    assert all(run(1.0, 1.0, 15))


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
def test_what_pays_is_kept_on(noise: float) -> None:
    assert sum(run(0.7, 1.0, 2000, noise=noise)) > 0.93 * 2000


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
def test_what_costs_is_switched_off(noise: float) -> None:
    assert sum(run(1.4, 1.0, 2000, noise=noise)) < 0.15 * 2000


def test_a_trial_costs_little() -> None:
    # From the first pass, with tokens that differ so much that it takes long to be certain.
    assert sum(run(0.9, 1.0, 200, noise=0.5)) > 0.84 * 200


@pytest.mark.parametrize("seed", range(20))
def test_a_disk_that_is_fast_and_slow_by_turns_decides_nothing(seed: int) -> None:
    trial, now, draw, pace, num_on = PayTrial(), 0.0, random.Random(seed), 1.0, 0
    for _ in range(600):
        pace = draw.choice([1.0, 2.0]) if draw.random() < 0.1 else pace
        is_on = trial.begin_pass(now, is_decode=True)
        num_on += is_on
        now += pace * (0.85 if is_on else 1.0) * draw.uniform(0.9, 1.1)
    assert num_on > 0.8 * 600


def test_it_is_tried_again_now_and_then() -> None:
    kinds = run(1.4, 1.0, 6000)
    assert any(kinds[1000:])
    assert sum(kinds[1000:]) < 0.02 * 5000


def test_a_change_is_noticed() -> None:
    trial = PayTrial()
    run(1.4, 1.0, 500, trial=trial)
    assert not trial.is_paying
    assert sum(run(0.7, 1.0, 1500, trial=trial)[-200:]) > 0.9 * 200
    assert trial.is_paying


def test_pauses_of_the_caller_do_not_decide() -> None:
    trial, now, draw = PayTrial(), 0.0, random.Random(1)
    for _ in range(400):
        is_on = trial.begin_pass(now, is_decode=True)
        now += 0.8 if is_on else 1.0
        if draw.random() < 0.1:
            now += 60.0
    assert trial.is_paying


def test_prompts_are_no_measure() -> None:
    trial, now = PayTrial(), 0.0
    for number in range(600):
        is_prompt = number % 3 == 0
        is_on = trial.begin_pass(now, is_decode=not is_prompt)
        # A prompt with guessing on would look terribly slow.
        now += 100.0 if is_prompt and is_on else 0.7 if is_on else 1.0
    assert trial.is_paying


def test_two_threads_that_end_a_trial_together_judge_once() -> None:
    trial = PayTrial()
    run(0.7, 1.0, 16 + 28 + 3, trial=trial)
    trial._judge()
    trial._judge()
    assert trial.is_paying
