"""Deadlines follow what a server took before."""

from __future__ import annotations

from swarm_plugins.client.deadlines import Deadlines


def test_an_unknown_server_gets_the_longest_wait() -> None:
    assert Deadlines(120.0).timeout_s("p", "rpc_session", 1) == 120.0


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
    assert deadlines.timeout_s("q", "rpc_session", 1) == 60.0
    assert deadlines.timeout_s("p", "rpc_forward", 1) == 60.0


def test_paces_of_a_crowd_are_forgotten_oldest_first() -> None:
    deadlines = Deadlines(120.0)
    for index in range(5000):
        deadlines.observe(f"p{index}", "rpc_session", 1, 0.05)
    assert deadlines.timeout_s("p0", "rpc_session", 1) == 120.0
    assert deadlines.timeout_s("p4999", "rpc_session", 1) < 120.0
