"""The planned chain covers the blocks, is the best one, and is found quickly."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_plugins.routing import Demand, ServerEntry, SpanChoice, missing_blocks, plan
from swarm_plugins.routing.chain import expected


def server(
    peer: str, start: int, end: int, *, rtt: float = 0.01, step: float = 0.001, throughput: float = 0.0, kv: int = 10**6
) -> ServerEntry:
    return ServerEntry(
        peer=peer,
        start=start,
        end=end,
        round_trip_s=rtt,
        step_s=step,
        throughput=throughput,
        free_kv_tokens=kv,
    )


def cost(chain: list[SpanChoice], servers: list[ServerEntry]) -> float:
    by_peer = {entry.peer: entry for entry in servers}
    return sum(by_peer[s.peer].round_trip_s + (s.end - s.start) * by_peer[s.peer].step_s for s in chain)


def brute_force(servers: list[ServerEntry], blocks: range) -> float:
    """The least cost over every assignment of blocks to servers."""
    holders = [[entry for entry in servers if entry.start <= block < entry.end] for block in blocks]
    best = float("inf")
    for owners in itertools.product(*holders):
        total = sum(owner.step_s for owner in owners)
        total += owners[0].round_trip_s
        total += sum(b.round_trip_s for a, b in itertools.pairwise(owners) if a.peer != b.peer)
        best = min(best, total)
    return best


entries = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 5), st.floats(0.001, 0.1), st.floats(0.001, 0.1)),
    min_size=1,
    max_size=5,
)


@given(entries)
@settings(max_examples=150, deadline=None)
def test_chain_is_contiguous_and_as_cheap_as_the_best_assignment(raw: list[tuple[int, int, float, float]]) -> None:
    servers = [
        server(f"p{i}", start, start + width, rtt=rtt, step=step) for i, (start, width, rtt, step) in enumerate(raw)
    ]
    blocks = range(5)
    chain = plan(servers, blocks, Demand())
    if missing_blocks(servers, blocks):
        assert chain is None
        return
    assert chain is not None
    assert [chain[0].start, chain[-1].end] == [0, 5]
    assert all(a.end == b.start and a.peer != b.peer for a, b in itertools.pairwise(chain))
    assert cost(chain, servers) == pytest.approx(brute_force(servers, blocks))


def test_one_server_with_everything_beats_two_round_trips() -> None:
    servers = [server("whole", 0, 8), server("left", 0, 4), server("right", 4, 8)]
    assert plan(servers, range(8), Demand()) == [SpanChoice("whole", 0, 8)]


def test_a_server_may_be_left_before_the_end_of_its_span() -> None:
    servers = [server("slow", 0, 8, step=0.1), server("quick", 4, 8, step=0.001)]
    assert plan(servers, range(8), Demand()) == [SpanChoice("slow", 0, 4), SpanChoice("quick", 4, 8)]


def test_large_batches_go_by_throughput_and_single_tokens_by_step_time() -> None:
    servers = [
        server("nimble", 0, 2, step=0.001, throughput=1000),
        server("strong", 0, 2, step=0.01, throughput=10_000),
    ]
    assert plan(servers, range(2), Demand(tokens=1)) == [SpanChoice("nimble", 0, 2)]
    assert plan(servers, range(2), Demand(tokens=1000)) == [SpanChoice("strong", 0, 2)]


def test_each_row_after_the_first_needs_room_for_its_states() -> None:
    near = replace(server("near", 0, 2, kv=1000), kv_row_tokens=400)
    servers = [near, server("roomy", 0, 2, rtt=5.0, kv=1000)]

    def chosen(rows: int) -> str:
        found = plan(servers, range(2), Demand(kv_tokens=10 * rows, kv_rows=rows))
        assert found is not None
        return found[0].peer

    # 1000 tokens are room for one row's states besides; two more rows take 800, and their tokens 30.
    assert [chosen(rows) for rows in (1, 3, 4)] == ["near", "near", "roomy"]
    # Without a session there is nothing to keep.
    assert plan(servers, range(2), Demand(tokens=10**6)) == [SpanChoice("near", 0, 2)]


def test_full_servers_are_the_last_resort() -> None:
    servers = [server("full", 0, 2, kv=10), server("roomy", 0, 2, rtt=5.0, kv=1000)]
    assert plan(servers, range(2), Demand(kv_tokens=100)) == [SpanChoice("roomy", 0, 2)]
    assert plan(servers[:1], range(2), Demand(kv_tokens=100)) == [SpanChoice("full", 0, 2)]


def test_missing_blocks_are_named() -> None:
    servers = [server("a", 0, 3), server("b", 5, 6)]
    assert missing_blocks(servers, range(8)) == [3, 4, 6, 7]
    assert plan(servers, range(8), Demand()) is None


def test_tied_blocks_stay_on_one_server() -> None:
    left, right, quick = server("left", 0, 4, step=0.001), server("right", 2, 8, step=1.0), server("quick", 5, 8)
    servers = [left, right, quick]
    assert plan(servers, range(8), Demand()) == [
        SpanChoice("left", 0, 4),
        SpanChoice("right", 4, 5),
        SpanChoice("quick", 5, 8),
    ]
    assert plan(servers, range(8), Demand(), tied={3, 4, 6}) == [
        SpanChoice("left", 0, 2),
        SpanChoice("right", 2, 5),
        SpanChoice("quick", 5, 8),
    ]
    assert missing_blocks(servers, range(8), tied={3, 4, 6}) == []
    # Blocks 4 and 5 have a server each, but none has both.
    servers = [left, server("middle", 4, 5), quick]
    assert missing_blocks(servers, range(8), tied={5, 6}) == [4, 5, 6]
    assert plan(servers, range(8), Demand(), tied={5, 6}) is None


def test_a_part_of_the_model_can_be_planned() -> None:
    servers = [server("a", 0, 6), server("b", 4, 8)]
    assert plan(servers, range(5, 8), Demand()) == [SpanChoice("b", 5, 8)]


def test_a_thousand_servers_are_planned_without_a_loop_over_pairs() -> None:
    rng = random.Random(0)
    servers = []
    for index in range(1000):
        start = rng.randrange(0, 96)
        servers.append(server(f"p{index}", start, min(100, start + rng.randrange(1, 30)), rtt=rng.random() / 10))
    started = time.process_time()
    chain = plan(servers, range(100), Demand())
    assert chain is not None
    # Far above the few milliseconds it takes: only a quadratic algorithm (1,000 x 1,000 x 100 steps) would fail.
    assert time.process_time() - started < 5


@pytest.mark.parametrize("claim", [{"step": math.nan}, {"step": math.inf}, {"step": -1.0}, {"throughput": math.nan}])
def test_server_with_impossible_numbers_wins_no_route(claim: dict[str, float]) -> None:
    honest, liar = server("honest", 0, 8), server("liar", 0, 8, rtt=9.0, **claim)
    assert plan([liar, honest], range(8), Demand(tokens=8)) == [SpanChoice("honest", 0, 8)]
    # Nor does it make another server stand for blocks that it does not hold.
    assert plan([server("honest", 0, 4), server("liar", 4, 8, **claim)], range(8), Demand(tokens=8)) is None


def test_hopelessly_slow_server_is_still_the_one_that_holds_its_blocks() -> None:
    servers = [server("honest", 0, 4), server("slow", 4, 8, throughput=5e-324)]
    assert plan(servers, range(8), Demand(tokens=8)) == [SpanChoice("honest", 0, 4), SpanChoice("slow", 4, 8)]


def test_servers_alike_are_chosen_at_random_and_always_alike_for_one_seed() -> None:
    servers = [server(f"p{index}", 0, 8, rtt=0.0, step=0.0) for index in range(8)]
    chains = [plan(servers, range(8), Demand(), seed=seed) for seed in range(200)]
    counts = Counter(chain[0].peer for chain in chains if chain is not None)
    assert len(counts) == 8
    assert max(counts.values()) < 60
    assert chains == [plan(servers[::-1], range(8), Demand(), seed=seed) for seed in range(200)]
    slower = [server("p0", 0, 8, rtt=0.0, step=0.011), server("p1", 0, 8, rtt=0.0, step=0.010)]
    assert {plan(slower, range(8), Demand(), seed=seed)[0].peer for seed in range(50)} == {"p1"}  # type: ignore[index]


@given(entries, st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_a_random_choice_costs_at_most_a_twentieth(raw: list[tuple[int, int, float, float]], seed: int) -> None:
    servers = [
        server(f"p{i}", start, start + width, rtt=rtt, step=step) for i, (start, width, rtt, step) in enumerate(raw)
    ]
    chain = plan(servers, range(5), Demand(), seed=seed)
    if chain is not None:
        assert cost(chain, servers) <= 1.05 * brute_force(servers, range(5))
        found = expected(servers, range(5), Demand(), Demand(), seed=seed)
        assert found is not None
        assert found.chain == chain
        assert found.step_s == found.replay_s == pytest.approx(cost(chain, servers))
