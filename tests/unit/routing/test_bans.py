"""Bans grow with every failure, end by themselves, and are forgotten after a success."""

from __future__ import annotations

from swarm_plugins.routing import BanList


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_ban_ends_and_the_next_one_is_twice_as_long() -> None:
    clock = Clock()
    bans = BanList(base_s=2.0, max_s=100.0, clock=clock)
    assert bans.ban("p") == 2.0
    assert bans.is_banned("p")
    assert not bans.is_banned("q")
    clock.now = 2.5
    assert not bans.is_banned("p")
    assert bans.ban("p") == 4.0


def test_a_ban_says_why_and_for_how_long() -> None:
    clock = Clock()
    bans = BanList(base_s=2.0, clock=clock)
    bans.ban("p", "the stream broke")
    bans.ban("p", "no answer")
    clock.now = 1.0
    bans.ban("q")
    assert bans.details() == {"p": (3.0, 2, "no answer"), "q": (2.0, 1, "")}
    clock.now = 3.5
    assert list(bans.details()) == ["p"]


def test_bans_are_bounded_however_often_a_peer_fails() -> None:
    bans = BanList(base_s=2.0, max_s=100.0, clock=Clock())
    assert [bans.ban("p") for _ in range(2000)][-1] == 100.0


def test_success_forgives() -> None:
    bans = BanList(base_s=2.0, clock=Clock())
    bans.ban("p")
    bans.ban("p")
    bans.forgive("p")
    assert not bans.is_banned("p")
    assert bans.ban("p") == 2.0


def test_failures_of_a_crowd_are_forgotten_oldest_first() -> None:
    bans = BanList(clock=Clock())
    for index in range(5000):
        bans.ban(f"p{index}")
    assert len(bans.banned()) == 4096
    assert not bans.is_banned("p0")
    assert bans.is_banned("p4999")


def test_the_only_holder_is_never_banned_out() -> None:
    clock = Clock()
    bans = BanList(clock=clock)
    shares = {"a": range(2), "b": range(2, 4), "c": range(2, 4), "d": range(4)}
    assert bans.usable(shares) == ["a", "b", "c", "d"]
    for peer in ("b", "c", "d"):
        clock.now += 0.1
        bans.ban(peer)
    # Of several, the one that failed longest ago.
    assert bans.usable(shares) == ["a", "b"]
    assert bans.usable({peer: shares[peer] for peer in ("a", "c")}) == ["a", "c"]
    assert bans.usable({"d": range(4)}) == ["d"]


def test_the_only_holder_is_asked_again_after_a_short_pause() -> None:
    clock = Clock()
    bans = BanList(clock=clock)
    assert bans.pause_s("a") == 0
    pauses = []
    for _ in range(6):
        bans.ban("a")
        pauses.append(bans.pause_s("a"))
    assert pauses == [0.25, 0.5, 1.0, 2.0, 2.0, 2.0]
    clock.now += 1.5
    assert bans.pause_s("a") == 0.5
    clock.now += 1.0
    assert bans.pause_s("a") == 0.0
