"""Chains whose servers hand outputs on: the best ones are found, and no server comes closer by its own word."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_plugins.routing import Demand, ServerEntry, SpanChoice, plan
from swarm_plugins.routing.chain import way_s

SESSION = Demand(kv_tokens=1)


def server(
    peer: str,
    start: int,
    end: int,
    rtt: float,
    to: Mapping[str, float] | None = None,
    *,
    step: float = 0.0,
    pushes: bool = True,
) -> ServerEntry:
    return ServerEntry(
        peer=peer,
        start=start,
        end=end,
        round_trip_s=rtt,
        step_s=step,
        throughput=0.0,
        free_kv_tokens=10**6,
        pushes=pushes,
        round_trips=to or {},
    )


def peers(servers: list[ServerEntry], *, closed: set[tuple[str, str]] | None = frozenset()) -> list[str]:  # type: ignore[assignment]
    chain = plan(servers, range(4), SESSION, closed=closed)
    assert chain is not None
    return [span.peer for span in chain]


FIRST = server("first", 0, 2, 0.1, {"near": 0.01, "far": 0.1})
NEAR = server("near", 2, 4, 0.11, {"first": 0.012})
FAR = server("far", 2, 4, 0.1, {"first": 0.1})


def test_servers_that_push_are_chosen_by_their_distance_from_each_other() -> None:
    assert peers([FIRST, NEAR, FAR]) == ["first", "near"]
    # By the client, what counts is the distance from there.
    assert peers([FIRST, NEAR, FAR], closed=None) == ["first", "far"]
    assert peers([FIRST, server("near", 2, 4, 0.11, {"first": 0.012}, pushes=False), FAR]) == ["first", "far"]
    # They have proved not to reach each other.
    assert peers([FIRST, NEAR, FAR], closed={("first", "near")}) == ["first", "far"]


@pytest.mark.parametrize(
    ("sender", "receiver", "chosen"),
    [
        ("", "", "here"),
        ("before", "", "beside"),
        ("", "after", "beside"),
        ("before", "after", "beside"),
        ("gone", "", "here"),
    ],
)
def test_what_takes_the_place_of_a_span_is_chosen_by_its_distance_from_the_neighbors(
    sender: str, receiver: str, chosen: str
) -> None:
    servers = [
        server("before", 0, 1, 0.1, {"beside": 0.01}),
        server("beside", 1, 3, 0.1, {"before": 0.01, "after": 0.01}),
        server("here", 1, 3, 0.09),
        server("after", 3, 4, 0.1, {"beside": 0.01}),
    ]
    demand = Demand(kv_tokens=1, sender=sender, receiver=receiver)
    assert plan(servers, range(1, 3), demand, closed=frozenset()) == [SpanChoice(chosen, 1, 3)]
    assert plan(servers, range(1, 3), demand) == [SpanChoice("here", 1, 3)], "nothing is handed on"


@pytest.mark.parametrize(
    ("liar", "seconds"),
    [
        pytest.param(server("liar", 2, 4, 0.2, {"first": 0.0}), 0.15, id="alone"),
        pytest.param(server("far", 2, 4, 0.2, {"first": 0.0}), 0.05, id="the-longer-figure"),
        pytest.param(server("near", 2, 4, 0.2, {"first": 0.0}), 0.05, id="the-triangle"),
        pytest.param(server("near", 2, 4, 0.105, {"first": 0.0}), 0.005, id="plausible"),
        pytest.param(server("near", 2, 4, 0.1, {"first": 60.0}), 0.1, id="by-the-client"),
    ],
)
def test_a_distance_is_believed_as_far_as_both_ends_and_the_client_agree(liar: ServerEntry, seconds: float) -> None:
    assert way_s(FIRST, liar) == way_s(liar, FIRST) == pytest.approx(seconds)


def test_a_full_server_is_a_last_resort_however_near() -> None:
    full = ServerEntry(
        peer="near",
        start=2,
        end=4,
        round_trip_s=0.1,
        step_s=0.0,
        throughput=0.0,
        free_kv_tokens=0,
        pushes=True,
        round_trips={"first": 0.001},
    )
    assert peers([FIRST, full, FAR]) == ["first", "far"]
    assert peers([FIRST, full]) == ["first", "near"]


raw_servers = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(1, 4),
        st.floats(0.001, 0.1),
        st.floats(0.0, 0.02),
        st.sampled_from([True, True, False]),
    ),
    min_size=1,
    max_size=5,
)
raw_distances = st.lists(st.one_of(st.none(), st.floats(0.0, 0.2)), min_size=25, max_size=25)


@given(raw_servers, raw_distances, st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=3))
@settings(max_examples=150, deadline=None)
def test_the_chain_is_as_short_as_the_best_assignment(
    raw: list[tuple[int, int, float, float, bool]], distances: list[float | None], closed: set[tuple[int, int]]
) -> None:
    said = [{f"p{j}": d for j in range(5) if (d := distances[5 * i + j]) is not None} for i in range(5)]
    servers = [
        server(f"p{i}", start, start + width, rtt, said[i], step=step, pushes=pushes)
        for i, (start, width, rtt, step, pushes) in enumerate(raw)
    ]
    pairs = {(f"p{i}", f"p{j}") for i, j in closed}
    chain = plan(servers, range(4), SESSION, closed=pairs)
    by_block = [[one for one in servers if one.start <= block < one.end] for block in range(4)]
    options = list(itertools.product(*by_block))
    if not options:
        assert chain is None
        return
    assert chain is not None
    best = min(seconds(list(owners), pairs) for owners in options)
    by_peer = {one.peer: one for one in servers}
    found = [by_peer[span.peer] for span in chain for _ in range(span.start, span.end)]
    assert seconds(found, pairs) == pytest.approx(best)


def seconds(owners: list[ServerEntry], closed: set[tuple[str, str]]) -> float:
    """The time of a chain, given by the server of each block, by the client or pushed, whichever takes less."""
    compute = sum(one.step_s for one in owners)
    hops = [(one, two) for one, two in itertools.pairwise(owners) if one.peer != two.peer]
    star = owners[0].round_trip_s + sum(two.round_trip_s for _, two in hops)
    pushed = math.inf
    if all(one.pushes for one in owners) and not any((one.peer, two.peer) in closed for one, two in hops):
        pushed = (owners[0].round_trip_s + owners[-1].round_trip_s) / 2 + sum(way_s(one, two) for one, two in hops)
    return compute + min(star, pushed)


def test_one_server_with_everything_is_one_round_trip() -> None:
    whole = server("whole", 0, 4, 0.1)
    assert plan([FIRST, NEAR, whole], range(4), SESSION, closed=set()) == [SpanChoice("whole", 0, 4)]
