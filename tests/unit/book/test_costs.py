"""What was seen of a server counts more than what it announces."""

from __future__ import annotations

import pytest
from client_kit import server_info

from swarm_plugins.book import judging
from swarm_plugins.book.record import Answered, PeerBook, Said, Unkept, unkept_tokens
from swarm_plugins.routing import Demand, ServerEntry, plan


def server(peer: str, *, step: float, throughput: float = 0.0) -> ServerEntry:
    return ServerEntry(
        peer=peer, start=0, end=4, round_trip_s=0.01, step_s=step, throughput=throughput, free_kv_tokens=1000
    )


def chosen(book: PeerBook, servers: list[ServerEntry], demand: Demand) -> str:
    chain = plan(judging.believed(book, servers), range(4), demand)
    assert chain is not None
    return chain[0].peer


@pytest.mark.parametrize("tokens", [1, 512])
def test_an_invented_speed_counts_for_three_calls(tokens: int) -> None:
    book = PeerBook()
    servers = [server("liar", step=1e-12, throughput=1e15), server("honest", step=1e-3, throughput=4e4)]
    calls = []
    for _ in range(30):
        peer = chosen(book, servers, Demand(tokens=tokens))
        book.observe(peer, Answered("rpc_forward", tokens, 3.0 if peer == "liar" else 0.1, blocks=4))
        calls.append(peer)
    assert calls == ["liar"] * 3 + ["honest"] * 27


def test_an_invented_speed_for_steps_counts_not_for_batches_once_it_is_seen() -> None:
    book = PeerBook()
    servers = [server("liar", step=1e-5, throughput=1e6), server("honest", step=1e-3, throughput=1e4)]
    assert chosen(book, servers, Demand(tokens=1000)) == "liar"
    for _ in range(3):
        book.observe("liar", Answered("rpc_session", 1, 2.0, blocks=4))
    assert chosen(book, servers, Demand(tokens=1000)) == "honest"


def test_announced_figures_are_clamped_by_the_fastest_server_seen() -> None:
    book = PeerBook()
    for _ in range(3):
        book.observe("known", Answered("rpc_session", 1, 0.05, blocks=4))
    known, stranger = judging.believed(book, [server("known", step=9.0), server("stranger", step=1e-9)])
    assert known.step_s == pytest.approx(0.01)
    assert stranger.step_s == pytest.approx(0.0025)


def test_announced_load_counts_within_bounds() -> None:
    def chosen_with(first: ServerEntry, load: float) -> str:
        book = PeerBook()
        book.observe(first.peer, Said(server_info(0, 4, 4, load=load)))
        return chosen(book, [first, server("idle", step=2e-3)], Demand())

    assert chosen_with(server("busy", step=1e-3), 0.0) == "busy"
    assert chosen_with(server("busy", step=1e-3), 0.8) == "idle"
    assert chosen_with(server("busy", step=1e-3), -5.0) == "busy"
    assert chosen_with(server("a", step=1e-4), 1e9) == "a"


def test_a_server_that_was_slow_long_ago_gets_another_chance() -> None:
    now = 0.0
    book = PeerBook(clock=lambda: now)
    servers = [server("was-busy", step=1e-3), server("other", step=2e-3)]
    for _ in range(3):
        book.observe("was-busy", Answered("rpc_session", 1, 0.03, blocks=4))
    assert chosen(book, servers, Demand()) == "other"
    now = 50.0
    assert chosen(book, servers, Demand()) == "other"
    now = 3600.0
    assert chosen(book, servers, Demand()) == "was-busy"


def test_a_server_whose_room_for_graphs_was_taken_long_ago_gets_another_chance() -> None:
    now = 0.0
    book = PeerBook(clock=lambda: now)
    assert unkept_tokens(book["p"], now) == 0
    for tokens in (400, 900):
        book.observe("p", Unkept(tokens))
    assert unkept_tokens(book["p"], now) == 400
    now = 3600.0
    assert unkept_tokens(book["p"], now) == 0
    book.observe("p", Unkept(900))
    assert unkept_tokens(book["p"], now) == 900


def test_round_trips_are_no_calls() -> None:
    book = PeerBook()
    for seconds in (9.0, 0.02, 0.01, 0.03):
        book.observe("p", Answered("rpc_info", 1, seconds))
    assert judging.round_trip_s(book["p"]) == 0.02
    assert judging.round_trip_s(book["q"]) is None
    assert judging.believed(book, [server("p", step=1e-3)])[0].step_s == 1e-3
