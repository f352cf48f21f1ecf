"""A simulated swarm with churn keeps near the optimum, and comes to rest."""

from __future__ import annotations

import pytest

from recipes.benchmarks.places.simulation import Course, Scenario, mean_coverage, simulate
from swarm_plugins.errors import ConfigError


def course_of(num_servers: int, **fields: object) -> Course:
    times = {"churn_h": 2.0, "quiet_h": 1.5} | fields
    return simulate(Scenario(num_servers=num_servers, num_blocks=16, lengths=(2, 3, 4, 6), **times))  # type: ignore[arg-type]


# Ten servers of such different speeds cannot share the blocks evenly, whatever they do.
@pytest.mark.parametrize(("num_servers", "share"), [pytest.param(10, 0.6, id="10"), pytest.param(60, 0.9, id="60")])
def test_the_swarm_stays_near_the_optimum_and_comes_to_rest(num_servers: int, share: float) -> None:
    course = course_of(num_servers)
    assert course.share_of(lambda servers: mean_coverage(16, servers)) > share
    assert course.moves_per_server_hour < 1.0
    assert course.rest_s < 1800
    assert course.num_uncovered == 0


def test_without_churn_all_come_to_rest() -> None:
    course = course_of(12, churn_h=0.0)
    assert course.moves_per_server_hour < 0.1
    assert course.throughputs[-1] > 0


def test_the_same_seed_gives_the_same_course() -> None:
    first, second = (course_of(5, seed=3) for _ in range(2))
    assert first.throughputs == second.throughputs
    assert first.moves_s == second.moves_s


def test_a_scenario_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lengths \(40,\): expected at least 1 server, and lengths of 1 to 32"):
        Scenario(lengths=(40,))
