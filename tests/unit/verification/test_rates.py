"""How often calls are checked."""

from __future__ import annotations

import random

from swarm_plugins.verification.rates import FIRST_CALLS, FLOOR, CheckRates


def test_first_calls_are_checked_then_fewer_down_to_the_floor() -> None:
    rates = CheckRates(chance=lambda: 0.0)
    for _ in range(FIRST_CALLS):
        assert rates.when("peer") == "before"
        rates.passed("peer")
    assert rates.when("peer") == "after"
    found = []
    for _ in range(8):
        found.append(rates.rate("peer"))
        rates.passed("peer")
    assert found == [0.5, 0.25, 0.125, 0.0625, 0.03125, FLOOR, FLOOR, FLOOR]


def test_a_doubt_makes_all_calls_checked_again() -> None:
    rates = CheckRates(chance=lambda: 0.99)
    for _ in range(20):
        rates.passed("peer")
    assert rates.when("peer") == "never"
    rates.doubt("peer")
    assert rates.when("peer") == "before"
    assert rates.when("another") == "before"


def test_an_honest_server_costs_few_checks() -> None:
    rates = CheckRates(chance=random.Random(0).random)
    checks = 0
    for _ in range(10_000):
        if rates.when("peer") != "never":
            checks += 1
            rates.passed("peer")
    assert 200 <= checks <= 260
