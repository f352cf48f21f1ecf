"""Deadlines follow what a server took before."""

from __future__ import annotations

from swarm_plugins.client.deadlines import Deadlines


def test_a_server_seen_for_the_first_time_gets_seconds_and_a_bound_for_its_work() -> None:
    deadlines = Deadlines(120.0)
    assert deadlines.timeout_s("p", "rpc_session", 1) < 5.1
    assert 10 < deadlines.timeout_s("p", "rpc_forward", 2048) < 30


def test_what_a_server_announces_lengthens_its_first_deadline_within_bounds() -> None:
    deadlines = Deadlines(120.0)
    deadlines.announce("slow", step_s=2.0, token_s=0.01)
    assert deadlines.timeout_s("slow", "rpc_session", 1) == 5.0 + 4 * 2.0
    assert deadlines.timeout_s("slow", "rpc_forward", 500) == 5.0 + 4 * 5.0
    deadlines.announce("liar", step_s=1e9, token_s=0.0)
    assert deadlines.timeout_s("liar", "rpc_session", 1) == 35.0


def test_a_living_server_that_missed_its_first_deadline_gets_more_time() -> None:
    deadlines = Deadlines(120.0)
    first = deadlines.timeout_s("p", "rpc_forward", 1)
    waits = []
    for _ in range(4):
        deadlines.missed("p", "rpc_forward")
        waits.append(deadlines.timeout_s("p", "rpc_forward", 1))
    assert waits == [first * 3, first * 9, 120.0, 120.0]
    assert deadlines.timeout_s("p", "rpc_session", 1) == first
    deadlines.observe("p", "rpc_forward", 1, 0.01)
    assert deadlines.timeout_s("p", "rpc_forward", 1) < 3.0


def test_a_quick_server_that_hangs_is_noticed_in_seconds() -> None:
    deadlines = Deadlines(120.0)
    for _ in range(5):
        deadlines.observe("p", "rpc_session", 1, 0.05)
    assert 2.5 < deadlines.timeout_s("p", "rpc_session", 1) <= 3.5


def test_a_slow_server_keeps_its_time() -> None:
    deadlines = Deadlines(120.0)
    deadlines.observe("p", "rpc_forward", 1024, 20.0)
    assert deadlines.timeout_s("p", "rpc_forward", 1024) == 120.0
    assert deadlines.timeout_s("p", "rpc_forward", 256) > 50.0


def test_the_pace_falls_slowly_after_a_large_cheap_request() -> None:
    deadlines = Deadlines(120.0)
    deadlines.observe("p", "rpc_session", 1, 1.0)
    deadlines.observe("p", "rpc_session", 1000, 2.0)
    assert deadlines.timeout_s("p", "rpc_session", 1) > 8.0


def test_servers_and_rpcs_are_apart() -> None:
    deadlines = Deadlines(60.0)
    deadlines.observe("p", "rpc_session", 1, 0.01)
    assert deadlines.timeout_s("q", "rpc_session", 1) > 5.0
    assert deadlines.timeout_s("p", "rpc_forward", 1) > 5.0


def test_paces_of_a_crowd_are_forgotten_oldest_first() -> None:
    deadlines = Deadlines(120.0)
    for index in range(5000):
        deadlines.observe(f"p{index}", "rpc_session", 1, 0.05)
    assert deadlines.timeout_s("p0", "rpc_session", 1) > 5.0
    assert deadlines.timeout_s("p4999", "rpc_session", 1) < 5.0
