"""Who is left out, who is checked, and who is asked to push: each ends by itself."""

from __future__ import annotations

import random

import pytest

from swarm_plugins.book import judging
from swarm_plugins.book.record import (
    Checked,
    Failed,
    Forgiven,
    Lagged,
    NotPushed,
    Outcome,
    PeerBook,
    Uncheckable,
    lag_s,
)
from swarm_plugins.book.rules import Rules

RULES = Rules()


class Book(PeerBook):
    """Its time stands still."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: self.time)
        self.time = 0.0

    def note(self, outcome: Outcome, peer: str = "p", *, times: int = 1) -> None:
        for _ in range(times):
            self.observe(peer, outcome)

    def left_s(self, peer: str = "p") -> float:
        return judging.ban_left_s(self[peer], self.time)


def test_bans_grow_with_every_failure_within_bounds_and_end_by_themselves() -> None:
    book = Book()
    found = []
    for _ in range(10):
        book.note(Failed(""))
        found.append(book.left_s())
    assert found == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0]
    assert not judging.is_banned(book, "q")
    book.time = 300.0
    assert not judging.is_banned(book, "p")
    book.note(Failed(""), times=2000)
    assert book.left_s() == 300.0


def test_a_good_answer_forgives() -> None:
    book = Book()
    book.note(Failed(""), times=2)
    book.note(Forgiven())
    assert not judging.is_banned(book, "p")
    book.note(Failed(""))
    assert book.left_s() == 2.0


def test_bans_are_listed_with_their_reasons_the_oldest_first() -> None:
    book = Book()
    book.note(Failed("the stream broke"))
    book.time = 1.0
    book.note(Failed("no answer"))
    book.time = 2.0
    book.note(Failed(""), "a")
    assert judging.bans(book) == {"p": (3.0, 2, "no answer"), "a": (2.0, 1, "")}
    assert list(judging.bans(book)) == ["p", "a"]
    book.time = 4.5
    assert list(judging.bans(book)) == ["p"]


def test_the_only_holder_is_never_banned_out() -> None:
    book = Book()
    shares = {"a": range(2), "b": range(2, 4), "c": range(2, 4), "d": range(4)}
    assert judging.usable(book, shares) == ["a", "b", "c", "d"]
    for peer in ("b", "c", "d"):
        book.time += 0.1
        book.note(Failed(""), peer)
    # Of several, the one that failed longest ago.
    assert judging.usable(book, shares) == ["a", "b"]
    assert judging.usable(book, {peer: shares[peer] for peer in ("a", "c")}) == ["a", "c"]
    assert judging.usable(book, {"d": range(4)}) == ["d"]


def test_the_only_holder_is_asked_again_after_a_short_pause() -> None:
    book = Book()
    assert judging.pause_s(book, "p") == 0
    pauses = []
    for _ in range(6):
        book.note(Failed(""))
        pauses.append(judging.pause_s(book, "p"))
    assert pauses == [0.25, 0.5, 1.0, 2.0, 2.0, 2.0]
    book.time = 1.5
    assert judging.pause_s(book, "p") == 0.5
    book.time = 2.5
    assert judging.pause_s(book, "p") == 0.0


def test_servers_that_do_not_reach_each_other_rest_ever_longer() -> None:
    book = Book()
    for rest_s in (60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0):
        book.note(NotPushed("b"), "a")
        assert judging.closed_ways(book, ["a", "b"]) == {("a", "b")}
        book.time += rest_s - 1
        assert judging.closed_ways(book, ["a", "b"])
        book.time += 1
        assert not judging.closed_ways(book, ["a", "b"])


def test_what_one_peer_can_invent_is_bounded() -> None:
    book = Book()
    for index in range(1000):
        book.note(NotPushed(str(index)))
        book.note(Uncheckable(index))
    assert len(book["p"].rests) == len(book["p"].checks) == 64


def test_a_holders_lag_grows_at_once_and_fades() -> None:
    book = Book()
    book.note(Lagged(3.0))
    assert lag_s(book["p"], 0.0) == 3.0
    book.note(Lagged(-3.0))
    assert lag_s(book["p"], 0.0) == pytest.approx(2.4), "one good answer is not believed"
    assert lag_s(book["p"], RULES.lag_half_life_s) == pytest.approx(1.2)


def when(book: PeerBook, chance: float, kind: str = "kind") -> str:
    return judging.when_checked(book, "p", kind, lambda: chance)


def test_first_calls_are_checked_then_fewer_down_to_the_floor() -> None:
    book = Book()
    for _ in range(RULES.first_checks):
        assert when(book, 0.0) == "before"
        book.note(Checked("kind", is_right=True))
    assert when(book, 0.0) == "after"
    found = []
    for _ in range(8):
        found.append(judging.check_share(book["p"], "kind"))
        book.note(Checked("kind", is_right=True))
    assert found == [0.5, 0.25, 0.125, 0.0625, 0.03125, *[RULES.least_checked] * 3]


def test_a_doubt_makes_all_calls_checked_again() -> None:
    book = Book()
    book.note(Checked("kind", is_right=True), times=20)
    assert when(book, 0.99) == "never"
    assert when(book, 0.99, "another") == "before"
    book.note(Checked("kind", is_right=False))
    assert when(book, 0.99) == "before"


def test_each_doubt_doubles_the_calls_that_are_checked_until_enough_are_right() -> None:
    book = Book()
    for first in (8, 16, 32, 64, 128, 256, 256):
        book.note(Checked("kind", is_right=False))
        book.note(Checked("kind", is_right=True), times=first - 1)
        book.note(Uncheckable("another"))
        assert when(book, 0.99) == "before"
        book.note(Checked("kind", is_right=True))
        assert when(book, 0.99) == "never"
    book.note(Checked("kind", is_right=True), times=256)
    book.note(Checked("kind", is_right=False))
    book.note(Checked("kind", is_right=True), times=8)
    assert when(book, 0.99) == "never", "forgiven"


def test_a_full_queue_makes_all_calls_checked_again_but_is_no_doubt() -> None:
    book = Book()
    book.note(Checked("kind", is_right=False, is_doubt=False), times=6)
    assert when(book, 0.99) == "before"
    book.note(Checked("kind", is_right=True), times=RULES.first_checks)
    assert when(book, 0.99) == "never"


def test_what_cannot_be_checked_is_tried_again_after_a_pause() -> None:
    book = Book()
    book.note(Uncheckable("kind"))
    assert when(book, 0.0) == "never"
    book.time = RULES.uncheckable_s
    assert when(book, 0.0) == "before"


def test_an_honest_server_costs_few_checks() -> None:
    book, chance = Book(), random.Random(0).random
    checks = 0
    for _ in range(10_000):
        if judging.when_checked(book, "p", "kind", chance) != "never":
            checks += 1
            book.note(Checked("kind", is_right=True))
    assert 200 <= checks <= 260
