"""Shares of the compute thread's time, by the peers' own history and address, whatever number of requests they send."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from swarm_plugins.server.compute.turns import Turns
from swarm_plugins.server.state.points import Points


@dataclass
class Item:
    peer: str
    work: int = 1


def shares(points: Points, load: dict[str, list[int]], rounds: int = 600) -> Counter[str]:
    """Returns the seconds that each peer gets, if all always wait with requests of given sizes, a second each token."""
    turns = Turns(points)
    had: Counter[str] = Counter()
    for _ in range(rounds):
        first = turns.order([Item(peer, size) for peer, sizes in load.items() for size in sizes])[0]
        turns.ran(first.work, first.work)
        turns.had(first.peer, first.work)
        had[first.peer] += first.work
    return had


def test_one_peer_gets_everything_in_its_order() -> None:
    items = [Item("a", 5), Item("a", 1), Item("a", 3)]
    assert Turns(Points()).order(items) == items


def test_large_and_many_requests_get_no_more_time() -> None:
    had = shares(Points(), {"flood": [100] * 20, "large": [400], "small": [1]}, rounds=4000)
    assert had["flood"] == pytest.approx(had["large"], rel=0.05)
    assert had["small"] == pytest.approx(had["large"], rel=0.05)


def test_idle_time_earns_nothing() -> None:
    turns = Turns(Points())
    for _ in range(1000):
        turns.had("busy", 100)
    order = turns.order([Item("late", 10) for _ in range(5)] + [Item("busy", 10) for _ in range(5)])
    # The late one is ahead by what the busy one has running, not by all that it has had.
    assert [item.peer for item in order].index("busy") <= 1 or Counter(item.peer for item in order[:10])["busy"] == 5


def test_identities_of_one_address_share_a_newcomers_turns() -> None:
    points = Points()
    sybils = [f"sybil {number}" for number in range(9)]
    for peer in sybils:
        points.met(peer, "/ip4/203.0.113.7/tcp/4001")
    points.met("honest", "/ip4/198.51.100.1/tcp/4001")
    had = shares(points, {**{peer: [10] for peer in sybils}, "honest": [10]})
    assert had["honest"] == pytest.approx(sum(had[peer] for peer in sybils), rel=0.05)
    # Where the address is unknown, each counts.
    had = shares(Points(), {**{peer: [10] for peer in sybils}, "honest": [10]})
    assert had["honest"] == pytest.approx(sum(had.values()) / 10, rel=0.1)


def test_who_has_served_gets_more_and_newcomers_keep_their_floor() -> None:
    points = Points()
    points.earned("server", 10**9)
    had = shares(points, {"server": [10], "newcomer": [10]})
    assert had["server"] / had["newcomer"] == pytest.approx(4.0, rel=0.05)
    # What it has taken counts against what it has given.
    points.served("server", 10**9)
    had = shares(points, {"server": [10], "newcomer": [10]})
    assert had["server"] / had["newcomer"] == pytest.approx(2.5, rel=0.05)
