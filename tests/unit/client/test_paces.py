"""What was seen of a server counts more than what it announces."""

from __future__ import annotations

import pytest

from swarm_plugins.client.paces import Paces, StepTimes
from swarm_plugins.routing import Demand, ServerEntry, plan


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def server(peer: str, *, step: float, throughput: float = 0.0) -> ServerEntry:
    return ServerEntry(
        peer=peer, start=0, end=4, round_trip_s=0.01, step_s=step, throughput=throughput, free_kv_tokens=1000
    )


def chosen(paces: Paces, servers: list[ServerEntry], demand: Demand, **loads: float) -> str:
    chain = plan(paces.corrected(servers, loads), range(4), demand)
    assert chain is not None
    return chain[0].peer


@pytest.mark.parametrize("tokens", [1, 512])
def test_an_invented_speed_counts_for_three_calls(tokens: int) -> None:
    paces = Paces()
    servers = [server("liar", step=1e-12, throughput=1e15), server("honest", step=1e-3, throughput=4e4)]
    calls = []
    for _ in range(30):
        peer = chosen(paces, servers, Demand(tokens=tokens))
        paces.observe(peer, "rpc_forward", blocks=4, tokens=tokens, seconds=3.0 if peer == "liar" else 0.1)
        calls.append(peer)
    assert calls == ["liar"] * 3 + ["honest"] * 27


def test_an_invented_speed_for_steps_counts_not_for_batches_once_it_is_seen() -> None:
    paces = Paces()
    servers = [server("liar", step=1e-5, throughput=1e6), server("honest", step=1e-3, throughput=1e4)]
    assert chosen(paces, servers, Demand(tokens=1000)) == "liar"
    for _ in range(3):
        paces.observe("liar", "rpc_session", blocks=4, tokens=1, seconds=2.0)
    assert chosen(paces, servers, Demand(tokens=1000)) == "honest"


def test_announced_figures_are_clamped_by_the_fastest_server_seen() -> None:
    paces = Paces()
    for _ in range(3):
        paces.observe("known", "rpc_session", blocks=4, tokens=1, seconds=0.05)
    known, stranger = paces.corrected([server("known", step=9.0), server("stranger", step=1e-9)], {})
    assert known.step_s == pytest.approx(0.01)
    assert stranger.step_s == pytest.approx(0.0025)


def test_announced_load_counts() -> None:
    servers = [server("busy", step=1e-3), server("idle", step=2e-3)]
    assert chosen(Paces(), servers, Demand()) == "busy"
    assert chosen(Paces(), servers, Demand(), busy=0.8) == "idle"
    # Whatever is announced: bounded.
    assert chosen(Paces(), [server("a", step=1e-4), servers[1]], Demand(), a=1e9) == "a"
    assert chosen(Paces(), servers, Demand(), busy=-5.0) == "busy"


def test_a_server_that_was_slow_long_ago_gets_another_chance() -> None:
    clock = Clock()
    paces = Paces(clock)
    servers = [server("was-busy", step=1e-3), server("other", step=2e-3)]
    for _ in range(3):
        paces.observe("was-busy", "rpc_session", blocks=4, tokens=1, seconds=0.03)
    assert chosen(paces, servers, Demand()) == "other"
    clock.now = 50.0
    assert chosen(paces, servers, Demand()) == "other"
    clock.now = 3600.0
    assert chosen(paces, servers, Demand()) == "was-busy"


def test_the_usual_time_is_that_of_requests_alike() -> None:
    paces = Paces()
    for number in range(20):
        paces.observe("p", "rpc_forward", blocks=4, tokens=100, seconds=0.1 + number / 100)
    assert paces.usual_s("p", "rpc_forward", blocks=4, tokens=100) == pytest.approx(0.28)
    assert paces.usual_s("p", "rpc_forward", blocks=4, tokens=190) == pytest.approx(0.28)
    for other in ({"tokens": 300}, {"tokens": 40}, {"blocks": 2}):
        assert paces.usual_s("p", "rpc_forward", **{"blocks": 4, "tokens": 100, **other}) is None
    assert paces.usual_s("p", "rpc_backward", blocks=4, tokens=100) is None
    assert paces.usual_s("q", "rpc_forward", blocks=4, tokens=100) is None


def test_round_trips_are_no_calls() -> None:
    paces = Paces()
    for seconds in (9.0, 0.02, 0.01, 0.03):
        paces.observe("p", "rpc_info", blocks=0, tokens=1, seconds=seconds)
    assert paces.round_trip_s("p") == 0.02
    assert paces.round_trip_s("q") is None
    assert paces.corrected([server("p", step=1e-3)], {})[0].step_s == 1e-3


def test_a_crowd_of_servers_is_forgotten_oldest_first() -> None:
    paces = Paces()
    for index in range(5000):
        paces.observe(f"p{index}", "rpc_info", blocks=0, tokens=1, seconds=0.1)
    assert paces.round_trip_s("p0") is None
    assert paces.round_trip_s("p4999") == 0.1


def test_a_session_moves_when_it_has_lost_what_the_move_costs() -> None:
    times = StepTimes()
    assert [times.add(0.05) for _ in range(8)] == [False, False, False, True] * 2
    assert not times.is_move_worth(0.04, 0.0)
    for _ in range(4):
        times.add(0.6)
    assert times.is_move_worth(0.05, 1.0)
    # A long text is not replayed for a few slow tokens, and a slightly faster server is not worth it.
    assert not times.is_move_worth(0.05, 5.0)
    assert not times.is_move_worth(0.3, 0.1)
    for _ in range(20):
        times.add(0.6)
    assert times.is_move_worth(0.05, 5.0)
    times.postpone()
    assert not any(times.add(0.6) for _ in range(31))
    assert times.add(0.6)
