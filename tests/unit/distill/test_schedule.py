"""The weight of the term at each step, and settings that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from swarm_plugins.distill.schedule import Schedule, check_temperature
from swarm_plugins.errors import ConfigError


def test_stop_keeps_the_weight_until_the_stop() -> None:
    schedule = Schedule(stop_at=3, alpha=0.5)
    assert [schedule.weight(step, 3) for step in range(5)] == [0.5, 0.5, 0.5, 0.0, 0.0]


def test_linear_falls_to_zero_at_the_stop() -> None:
    schedule = Schedule(stop_at=4, alpha=0.8, kind="linear")
    weights = [schedule.weight(step, 4) for step in range(6)]
    assert weights == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0, 0.0])


@pytest.mark.parametrize(
    ("stop_at", "total", "step"),
    [(7, 100, 7), (7, math.inf, 7), (0, 100, 0), (0.0, 100, 0), (0.5, 100, 50), (0.1, 30, 3), (1.0, 9, 9), (0.3, 1, 1)],
)
def test_stop_is_a_step_or_a_fraction_of_the_run(stop_at: float, total: float, step: int) -> None:
    assert Schedule(stop_at=stop_at).stop_step(total) == step


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop_at": -1}, r"stop_at=-1 must be at least 0"),
        ({"stop_at": -0.1}, r"stop_at=-0.1 is a float.*from 0.0 to 1.0; give a number of steps as an integer"),
        ({"stop_at": 400.0}, r"stop_at=400.0 is a float.*from 0.0 to 1.0"),
        ({"stop_at": math.nan}, r"stop_at=nan is a float"),
        ({"stop_at": True}, r"stop_at=True must be a step"),
        ({"stop_at": "half"}, r"stop_at='half' must be a step such as 4000"),
        ({"stop_at": 1, "alpha": 1.5}, r"alpha=1.5 must lie from 0 to 1"),
        ({"stop_at": 1, "alpha": -0.1}, r"alpha=-0.1 must lie from 0 to 1"),
        ({"stop_at": 1, "alpha": math.nan}, r"alpha=nan must lie"),
        ({"stop_at": 1, "kind": "liner"}, r"schedule='liner' must be one of 'stop', 'linear'"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schedule(**settings)


def test_a_fraction_of_a_run_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stop_at=0.5 is a fraction, but.*max_steps or max_epochs"):
        Schedule(stop_at=0.5).stop_step(math.inf)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_must_be_positive(temperature: float) -> None:
    with pytest.raises(ConfigError, match=f"temperature={temperature} must be above 0"):
        check_temperature(temperature)
