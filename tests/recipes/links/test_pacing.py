"""When bytes arrive: arithmetic, without a clock."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.benchmarks.links import NETWORKS, Link, Way
from recipes.benchmarks.links.pacing import Pacer
from swarm_plugins.errors import ConfigError


def test_a_link_divides_its_round_trip_and_may_differ_in_each_direction() -> None:
    there, back = Link(rtt_ms=100, mbit=20).ways()
    assert there == back == Way(delay_ms=50, mbit=20)
    there, back = Link(rtt_ms=10, back=Way(delay_ms=70)).ways()
    assert (there.delay_ms, back.delay_ms) == (5, 70)


def test_bytes_leave_one_after_the_other() -> None:
    pacer = Pacer(Way(delay_ms=50, mbit=8))
    assert pacer.arrival(1.0, 1_000_000) == pytest.approx(2.05)
    # It waits for those before it.
    assert pacer.arrival(1.5, 500_000) == pytest.approx(2.55)
    assert pacer.arrival(9.0, 0) == pytest.approx(9.05)
    assert (pacer.num_bytes, pacer.num_sent) == (1_500_000, 2)


def test_without_a_link_bytes_arrive_at_once() -> None:
    assert Pacer(Way()).arrival(3.0, 1 << 30) == 3.0


def test_jitter_and_losses_delay_and_keep_the_order() -> None:
    way = Way(delay_ms=20, jitter_ms=10, loss=0.2)
    arrivals = [Pacer(way, seed=1).arrival(1.0, 1500) for _ in range(2)]
    assert arrivals[0] == arrivals[1], "the same seed gives the same arrivals"
    pacer = Pacer(way, seed=1)
    times = [pacer.arrival(number / 10, 1500) for number in range(1000)]
    assert times == sorted(times)
    late = [time - number / 10 for number, time in enumerate(times)]
    assert min(late) >= 0.02
    # A lost packet comes a round trip later, one of five is lost.
    assert 0.1 < sum(one > 0.05 for one in late) / len(late) < 0.35


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rtt_ms": -1}, "invalid rtt_ms -1: give milliseconds"),
        ({"rtt_ms": float("nan")}, "invalid rtt_ms nan"),
        ({"mbit": 0}, "invalid mbit 0: give a rate above 0"),
        ({"loss": 1.0}, "invalid loss 1.0: give a probability"),
        ({"jitter_ms": float("inf")}, "invalid jitter_ms inf"),
        ({"rtt_ms": "40"}, "invalid rtt_ms '40': give milliseconds"),
        ({"mbit": "20"}, "invalid mbit '20': give a rate"),
        ({"loss": None}, "invalid loss None: give a probability"),
        ({"back": 20}, "invalid back 20: give one direction, such as Way"),
        ({"back": Link()}, "invalid back Link"),
    ],
)
def test_figures_out_of_range_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Link(**wrong)


def test_petals_networks_are_known() -> None:
    assert NETWORKS["100mbit-100ms"] == Link(rtt_ms=100, mbit=100)
