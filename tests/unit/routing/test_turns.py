"""Turns: one server moves at a time, and none waits for a dead one for ever."""

from __future__ import annotations

from dataclasses import replace

from swarm_plugins.routing.placement import Placed
from swarm_plugins.routing.turns import Snapshot, Turns

A = Placed(peer="a", start=0, end=4, rate=1.0, mobility="loads-first")
B = replace(A, peer="b")
C = replace(A, peer="c", start=4, end=8, mobility="pinned")
D = replace(A, peer="d", start=8, end=12, mobility="pinned")


def test_exactly_one_server_moves() -> None:
    snapshot = Snapshot(8, [A, B])
    moves = [Turns(peer).mine(snapshot, 0.0) for peer in ("a", "b", "c")]
    [move] = [one for one in moves if one is not None]
    assert move.blocks == range(4, 8)
    assert move.closes_gap


def test_others_wait_for_a_mover_but_not_for_ever() -> None:
    servers = [A, B, replace(B, peer="e"), C, replace(D, mobility="loads-first", target=range(8, 12))]
    snapshot = Snapshot(12, servers)
    turns = {peer: Turns(peer, patience_s=100.0) for peer in ("a", "b", "e")}
    assert [one.mine(snapshot, 0.0) for one in turns.values()] == [None] * 3
    assert [one.mine(snapshot, 99.0) for one in turns.values()] == [None] * 3
    late = [one.mine(snapshot, 101.0) for one in turns.values()]
    assert sum(one is not None for one in late) == 1
    # One that names another target then, or stays for a moment, is not waited for anew.
    other = Snapshot(12, [*servers[:-1], replace(D, target=range(7, 11))])
    assert sum(one.mine(other, 102.0) is not None for one in turns.values()) == 1
    assert sum(one.mine(Snapshot(12, servers[:-1]), 150.0) is not None for one in turns.values()) == 1
    assert sum(one.mine(other, 160.0) is not None for one in turns.values()) == 1
    # One that has stayed is.
    assert [one.mine(other, 261.0) for one in turns.values()] == [None] * 3


def test_nobody_loses_a_turn_while_another_moves() -> None:
    moving = Snapshot(12, [A, B, C, replace(D, mobility="loads-first", target=range(8, 12))])
    arrived = Snapshot(12, [A, B, D])
    [due] = [peer for peer in ("a", "b") if Turns(peer).mine(arrived, 0.0) is not None]
    other = Turns("b" if due == "a" else "a", turn_s=10.0)
    assert other.mine(arrived, 0.0) is None
    assert other.mine(moving, 5.0) is None
    assert other.mine(moving, 95.0) is None
    assert other.mine(arrived, 100.0) is None
    assert other.mine(arrived, 105.0) is None  # the turn began at 100


def test_who_has_lost_a_turn_has_one_again_later() -> None:
    snapshot = Snapshot(8, [A, B])
    [due] = [peer for peer in ("a", "b") if Turns(peer).mine(snapshot, 0.0) is not None]
    other = Turns("b" if due == "a" else "a", turn_s=10.0, patience_s=100.0)
    moves = [other.mine(snapshot, now) for now in (0.0, 11.0, 12.0, 112.0)]
    assert [move is not None for move in moves] == [False, False, True, False]


def test_a_server_that_does_not_take_its_turn_loses_it() -> None:
    snapshot = Snapshot(8, [A, B])
    due = next(peer for peer in ("a", "b") if Turns(peer).mine(snapshot, 0.0) is not None)
    other = Turns("b" if due == "a" else "a", turn_s=10.0)
    assert other.mine(snapshot, 0.0) is None
    assert other.mine(snapshot, 11.0) is None
    move = other.mine(snapshot, 12.0)
    assert move is not None
    assert move.peer == other.peer


def test_those_that_join_together_take_different_spans() -> None:
    joining = [replace(A, peer=peer, is_online=False) for peer in ("x", "y")]
    spans = {one.peer: Snapshot(8, joining).span_of_new(one.peer, 4, 1.0) for one in joining}
    assert sorted(span.start for span in spans.values()) == [0, 4]
