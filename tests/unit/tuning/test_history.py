"""Steps of a run as points of a plot."""

from __future__ import annotations

import itertools

import pytest
import torch

from swarm_plugins.tuning.computing import Computed
from swarm_plugins.tuning.datums import Datum
from swarm_plugins.tuning.history import History, Tally


def computed(*losses: float) -> Computed:
    values = torch.tensor(losses)
    return Computed(-values, values)


def test_a_step_has_the_calls_before_it() -> None:
    texts = [
        Datum(torch.arange(4), {"reward": torch.tensor([1.0])}),
        Datum(torch.arange(2), {"reward": torch.tensor(0.0)}),
        Datum(torch.arange(3), {"reward": torch.tensor(float("nan"))}),
    ]
    history = History()
    # What weights of 0 mask does not count.
    history.add(Tally.of(texts[:1], [computed(0.0, 0.0, 3.0, 1.0)], 0.5))
    history.add(Tally.of(texts[1:], [computed(2.0, 2.0), computed(2.0, 0.0, 0.0)], 1.0))
    history.step(1, 0.5)
    history.step(2, 0.0)
    first, second = history.points()
    assert (first.step, first.loss, first.reward, first.tokens_per_s) == (1, 2.0, 0.5, 4.5)
    assert (second.loss, second.reward, second.tokens_per_s) == (0.0, None, 0.0)


def test_calls_of_a_step_that_fails_are_forgotten() -> None:
    history = History()
    history.add(Tally(loss=100.0, num_losses=1, num_tokens=1, seconds=1.0))
    history.drop()
    history.add(Tally(loss=1.0, num_losses=1, num_tokens=1, seconds=1.0))
    history.step(1, 0.0)
    assert [point.loss for point in history.points()] == [1.0]


def test_a_mean_of_large_rewards_is_finite() -> None:
    text = Datum(torch.arange(4), {"reward": torch.full((4,), 3e38)})
    assert Tally.of([text], [computed(1.0)], 1.0).reward == pytest.approx(3e38)


@pytest.mark.parametrize("num_steps", [7, 8, 9, 100, 1000])
def test_points_are_bounded_and_none_is_lost(num_steps: int) -> None:
    history = History(max_points=8)
    for step in range(1, num_steps + 1):
        history.add(Tally(loss=float(step), num_losses=1, num_tokens=10, seconds=1.0))
        history.step(step, 0.0)
    points = history.points()
    assert num_steps / 200 < len(points) <= 8
    assert points[-1].step == num_steps
    assert [point.loss for point in points] == sorted(point.loss for point in points)
    spans = [end - start for start, end in itertools.pairwise([0, *(point.step for point in points)])]
    assert len(set(spans[:-1])) <= 1
    total = sum(point.loss * span for point, span in zip(points, spans, strict=True))
    assert total == pytest.approx(num_steps * (num_steps + 1) / 2)
