"""How long a peer is waited for follows what it took before."""

from __future__ import annotations

import pytest

from swarm_plugins.book import judging
from swarm_plugins.book.record import Answered, Expected, Missed, PeerBook


def timeout_s(book: PeerBook, peer: str, work: str, units: int = 1) -> float:
    return judging.timeout_s(book[peer], work, units)


def test_a_peer_seen_for_the_first_time_gets_seconds_and_a_bound_for_its_work() -> None:
    assert timeout_s(PeerBook(), "p", "rpc_session") < 5.1
    assert 10 < timeout_s(PeerBook(), "p", "rpc_forward", 2048) < 30


def test_what_a_server_announces_lengthens_its_first_deadline_within_bounds() -> None:
    book = PeerBook()
    book.observe("slow", Expected(step_s=2.0, token_s=0.01))
    assert timeout_s(book, "slow", "rpc_session") == 5.0 + 4 * 2.0
    assert timeout_s(book, "slow", "rpc_forward", 500) == 5.0 + 4 * 5.0
    book.observe("liar", Expected(step_s=1e9, token_s=0.0))
    assert timeout_s(book, "liar", "rpc_session") == 35.0


def test_a_living_server_that_missed_its_first_deadline_gets_more_time() -> None:
    book = PeerBook()
    first = timeout_s(book, "p", "rpc_forward")
    waits = []
    for _ in range(4):
        book.observe("p", Missed("rpc_forward"))
        waits.append(timeout_s(book, "p", "rpc_forward"))
    assert waits == [first * 3, first * 9, 120.0, 120.0]
    assert timeout_s(book, "p", "rpc_session") == first
    book.observe("p", Answered("rpc_forward", 1, 0.01))
    assert timeout_s(book, "p", "rpc_forward") < 3.0


def test_a_quick_server_that_hangs_is_noticed_in_seconds() -> None:
    book = PeerBook()
    for _ in range(5):
        book.observe("p", Answered("rpc_session", 1, 0.05))
    assert 2.5 < timeout_s(book, "p", "rpc_session") <= 3.5


def test_a_slow_server_keeps_its_time() -> None:
    book = PeerBook()
    book.observe("p", Answered("rpc_forward", 1024, 20.0))
    assert timeout_s(book, "p", "rpc_forward", 1024) == 120.0
    assert timeout_s(book, "p", "rpc_forward", 256) > 50.0


def test_the_pace_falls_slowly_after_a_large_cheap_request() -> None:
    book = PeerBook()
    book.observe("p", Answered("rpc_session", 1, 1.0))
    book.observe("p", Answered("rpc_session", 1000, 2.0))
    assert timeout_s(book, "p", "rpc_session") > 8.0


def test_the_usual_time_is_that_of_requests_alike() -> None:
    book = PeerBook()
    for number in range(20):
        book.observe("p", Answered("rpc_forward", 100, 0.1 + number / 100, blocks=4))

    def usual_s(peer: str, work: str = "rpc_forward", *, blocks: int = 4, tokens: int = 100) -> float | None:
        return judging.usual_s(book[peer], work, blocks=blocks, tokens=tokens)

    assert usual_s("p") == pytest.approx(0.28)
    assert usual_s("p", tokens=190) == pytest.approx(0.28)
    assert usual_s("p", tokens=300) is None
    assert usual_s("p", tokens=40) is None
    assert usual_s("p", blocks=2) is None
    assert usual_s("p", "rpc_backward") is None
    assert usual_s("q") is None


def test_a_crowd_of_peers_is_forgotten_oldest_first() -> None:
    book = PeerBook()
    for index in range(5000):
        book.observe(f"p{index}", Answered("rpc_session", 1, 0.05))
    assert timeout_s(book, "p0", "rpc_session") > 5.0
    assert timeout_s(book, "p4999", "rpc_session") < 5.0
    assert len(book.records()) == 4096
