"""Placement: where a server helps most, and moves that never uncover a block and come to rest."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from swarm_plugins.errors import ConfigError
from swarm_plugins.routing.placement import Mobility, Move, Placed, best_span, is_safe, next_move, rank, throughput

FREE: Mobility = "loads-first"


def placed(peer: str, start: int, end: int, rate: float = 1.0, mobility: Mobility = FREE, **fields: object) -> Placed:
    return Placed(peer=peer, start=start, end=end, rate=rate, mobility=mobility, **fields)  # type: ignore[arg-type]


def random_swarm(rng: random.Random, num_blocks: int, num_servers: int) -> list[Placed]:
    servers = []
    for index in range(num_servers):
        length = rng.randint(1, num_blocks)
        start = rng.randrange(num_blocks - length + 1)
        mobility = rng.choice(("pinned", "drops-first", FREE))
        is_online, rate = rng.random() < 0.9, rng.choice((0.0, rng.lognormvariate(0, 1)))
        servers.append(placed(f"peer{index}", start, start + length, rate, mobility, is_online=is_online))
    return servers


def after(servers: Sequence[Placed], move: Move) -> list[Placed]:
    blocks = move.blocks
    return [replace(one, start=blocks.start, end=blocks.stop) if one.peer == move.peer else one for one in servers]


def held(servers: Sequence[Placed]) -> set[int]:
    return {block for one in servers if one.is_relied_on for block in one.blocks}


@pytest.mark.parametrize(
    ("servers", "length", "span"),
    [
        pytest.param([], 3, range(3), id="first-server"),
        pytest.param([placed("a", 0, 4)], 4, range(4, 8), id="the-gap"),
        pytest.param([placed("a", 0, 6)], 3, range(5, 8), id="the-whole-gap"),
        pytest.param([placed("a", 0, 8, 3.0), placed("b", 0, 4, 1.0)], 4, range(4, 8), id="the-weak-half"),
        pytest.param([placed("a", 0, 4), placed("b", 4, 8, is_online=False)], 4, range(4), id="one-that-joins-counts"),
        pytest.param([placed("a", 0, 4, math.inf), placed("b", 4, 8, math.nan)], 8, range(8), id="impossible-rates"),
        pytest.param(
            [placed("a", 0, 4, target=range(4, 8)), placed("b", 4, 8)], 4, range(4), id="a-mover-at-its-target"
        ),
    ],
)
def test_a_new_server_takes_the_span_that_helps_most(servers: list[Placed], length: int, span: range) -> None:
    assert best_span(8, servers, length) == span


@pytest.mark.parametrize(
    ("length", "tied", "span"),
    [
        pytest.param(4, {1, 2, 3, 7}, range(4, 8), id="as-many"),
        pytest.param(3, {1, 2, 3, 7}, range(5, 8), id="behind-a-piece"),
        pytest.param(3, {1, 2, 3, 5, 7}, range(4, 6), id="fewer"),
    ],
)
def test_a_new_server_cuts_no_piece(length: int, tied: set[int], span: range) -> None:
    assert best_span(8, [placed("a", 0, 4)], length, tied=tied) == span


def test_a_server_that_is_too_small_for_any_piece_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot serve 1 blocks: 2 of this model's or more only run together"):
        best_span(4, [], 1, tied={1, 3})


def test_a_move_cuts_no_piece() -> None:
    servers = [placed("a", 0, 2), placed("b", 0, 2), placed("c", 0, 4)]
    assert next_move(6, servers, {5}) == Move(min(("a", "b"), key=rank), range(4, 6), closes_gap=True)
    assert next_move(6, servers, {4}) == Move("c", range(2, 6), closes_gap=True)
    assert next_move(6, servers, {2, 3, 4, 5}) is None


def test_a_span_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot serve 9 blocks: expected 1 to 8"):
        best_span(8, [], 9)


@pytest.mark.parametrize(
    ("servers", "move"),
    [
        pytest.param([placed("a", 0, 4), placed("b", 0, 4)], ({"a", "b"}, range(4, 8)), id="one-of-two-closes-the-gap"),
        pytest.param([placed("a", 0, 4)], None, id="the-only-one-stays"),
        pytest.param([placed("a", 0, 4, mobility="pinned"), placed("b", 0, 4)], ({"b"}, range(4, 8)), id="pinned"),
        pytest.param(
            [placed("a", 0, 4), placed("b", 0, 4, is_online=False)], None, id="nothing-is-left-to-one-that-loads"
        ),
        pytest.param(
            [placed("a", 0, 4), placed("b", 0, 4, target=range(4, 8))], None, id="nothing-is-left-to-one-that-moves"
        ),
        pytest.param(
            [placed("a", 0, 5), placed("b", 3, 7)], ({"b"}, range(4, 8)), id="a-shift-keeps-what-it-holds-alone"
        ),
        pytest.param(
            [placed("a", 0, 5), placed("b", 3, 7, mobility="drops-first")], None, id="no-shift-without-memory"
        ),
        pytest.param(
            [placed("a", 0, 8), placed("b", 0, 4), placed("c", 0, 4)], ({"b", "c"}, range(4, 8)), id="balance"
        ),
        pytest.param([placed("a", 0, 8, 50.0), placed("b", 0, 4, 1.0), placed("c", 4, 8, 1.1)], None, id="little-gain"),
        pytest.param([placed("a", 0, 4), placed("b", 4, 8)], None, id="balanced"),
        pytest.param([], None, id="nobody"),
    ],
)
def test_the_next_move(servers: list[Placed], move: tuple[set[str], range] | None) -> None:
    found = next_move(8, servers)
    if move is None:
        assert found is None
    else:
        assert found is not None
        assert found.peer in move[0]
        assert found.blocks == move[1]
        assert is_safe(8, servers, found)


@pytest.mark.parametrize("seed", range(40))
def test_moves_uncover_nothing_do_not_depend_on_the_order_and_end(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks = rng.randint(1, 24)
    servers = random_swarm(rng, num_blocks, rng.randint(1, 14))
    for _ in range(40):
        move = next_move(num_blocks, servers)
        if move is None:
            return
        shuffled = rng.sample(servers, len(servers))
        assert next_move(num_blocks, shuffled) == move
        assert is_safe(num_blocks, servers, move)
        moved = after(servers, move)
        assert held(servers) <= held(moved)
        if move.closes_gap:
            assert len(held(moved)) > len(held(servers)) or any(not one.is_online for one in servers)
        mover = next(one for one in servers if one.peer == move.peer)
        assert mover.mobility != "pinned"
        assert mover.is_relied_on
        servers = moved
    pytest.fail("the servers never come to rest")


def test_the_weakest_block_gains() -> None:
    rng = random.Random(1)
    for _ in range(3):
        servers = [replace(one, mobility=FREE, is_online=True) for one in random_swarm(rng, 16, 12)]
        before = throughput(16, servers)
        while (move := next_move(16, servers)) is not None:
            servers = after(servers, move)
        assert throughput(16, servers) >= before


def test_a_move_is_unsafe_when_the_others_have_gone() -> None:
    servers = [placed("a", 0, 4), placed("b", 0, 4)]
    move = Move("a", range(4, 8), closes_gap=True)
    assert is_safe(8, servers, move)
    assert not is_safe(8, servers[:1], move)
    assert not is_safe(8, [servers[0], replace(servers[1], target=range(4, 8))], move)
    assert is_safe(8, servers[:1], Move("a", range(1, 5), closes_gap=False)) is False
    assert is_safe(8, servers[1:], move)


def test_invented_rates_do_not_hold_others_off() -> None:
    honest = [placed(f"p{index}", 0, 4, 10.0) for index in range(5)]
    liar = placed("liar", 4, 8, 1e12, mobility="pinned")
    move = next_move(8, [*honest, liar])
    assert move is None  # bounded at ten times the median, it still is as fast as all of them
    assert best_span(8, [*honest, *honest, *honest, liar], 4) == range(4, 8)
