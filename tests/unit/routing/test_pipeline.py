"""Chains of a batch's chunks: replicas share them by their speed, and more chunks have to pay."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from swarm_plugins.routing import ServerEntry
from swarm_plugins.routing.pipeline import Schedule, best_schedule, schedule


def server(peer: str, start: int, end: int, *, token_s: float = 0.01, trip_s: float = 0.0) -> ServerEntry:
    return ServerEntry(
        peer=peer,
        start=start,
        end=end,
        round_trip_s=trip_s,
        step_s=0.0,
        throughput=1.0 / token_s,
        free_kv_tokens=0,
    )


def chunks(count: int, tokens: int = 800) -> list[int]:
    return [tokens // count] * count


@pytest.mark.parametrize("trip_s", [0.0, 0.3], ids=["near", "far"])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_one_chain_fills_and_drains(count: int, trip_s: float) -> None:
    servers = [server(str(index), index, index + 1, trip_s=trip_s) for index in range(3)]
    found = schedule(servers, range(3), chunks(count))
    assert found is not None
    assert found.chains == [[("0", 0, 1), ("1", 1, 2), ("2", 2, 3)]] * count
    # Huang et al. 2019, section 2.3: 3 servers take 3 + count - 1 steps, each of a part of the tokens.
    assert found.seconds == pytest.approx(3 * trip_s + 8.0 / count * (count + 2), rel=0.01)


@pytest.mark.parametrize("closed", [None, frozenset({("0", "1")}), frozenset()], ids=["by-the-client", "cut", "pushed"])
def test_what_servers_hand_on_takes_the_way_between_them(closed: frozenset[tuple[str, str]] | None) -> None:
    servers = [
        replace(server(one, index, index + 1, trip_s=0.3), pushes=True, round_trips={other: 0.1})
        for index, (one, other) in enumerate([("0", "1"), ("1", "0")])
    ]
    found = schedule(servers, range(2), chunks(4), closed=closed)
    assert found is not None
    trips_s = 0.15 + 0.05 + 0.15 if closed == frozenset() else 2 * 0.3
    assert found.seconds == pytest.approx(trips_s + 5 * 2.0, rel=0.002)


@pytest.mark.parametrize(("slow", "expected"), [(1.0, 6), (2.0, 4), (5.0, 2)])
def test_replicas_share_chunks_by_their_speed(slow: float, expected: int) -> None:
    servers = [server("fast", 0, 2, trip_s=0.1), server("other", 0, 2, token_s=0.01 * slow, trip_s=0.1)]
    found = schedule(servers, range(2), chunks(12))
    assert found is not None
    assert all(len(chain) == 1 for chain in found.chains)
    assert Counter(chain[0].peer for chain in found.chains) == {"fast": 12 - expected, "other": expected}
    # The slower one ends last, or both at the same time.
    assert found.seconds == pytest.approx(0.1 + expected * slow * 2 * 8.0 / 12, rel=0.01)


def test_servers_shared_by_chains_of_other_borders_are_not_given_too_much() -> None:
    servers = [server("left", 0, 2), server("right", 2, 4), server("whole", 0, 4)]
    found = schedule(servers, range(4), chunks(9))
    assert found is not None
    work = Counter[str]()
    for chain in found.chains:
        assert [span.start for span in chain] == [0, *(span.end for span in chain[:-1])]
        assert chain[-1].end == 4
        for span in chain:
            work[span.peer] += span.end - span.start
    # A third each, as all are alike fast.
    assert work == {"left": 12, "right": 12, "whole": 12}


def test_a_block_without_a_server_has_no_schedule() -> None:
    assert schedule([server("a", 0, 1)], range(2), [5]) is None
    assert best_schedule([server("a", 0, 1)], range(2), [[5], [3, 2]]) is None


def counted(found: Schedule | None) -> int:
    assert found is not None
    return len(found.chains)


def test_more_chunks_are_taken_only_if_they_pay() -> None:
    options = [chunks(count) for count in (1, 2, 4, 8, 16)]
    three = [server(str(index), index, index + 1) for index in range(3)]
    assert counted(best_schedule(three, range(3), options)) == 16
    # One server works all the time anyway.
    assert counted(best_schedule([server("a", 0, 3)], range(3), options)) == 1
    assert counted(best_schedule([server("a", 0, 3), server("b", 0, 3)], range(3), options)) == 2
    # Fast servers, far away: the network takes the time.
    far = [server(str(index), index, index + 1, token_s=1e-5, trip_s=0.2) for index in range(3)]
    assert counted(best_schedule(far, range(3), options)) == 1
    # What a chunk takes however small it is, is paid for each: 6 steps of 1 + 2 s are fewer than 10 of 1 + 1.
    stepwise = [ServerEntry(**{**vars_of(one), "step_s": 1.0}) for one in three]
    assert counted(best_schedule(stepwise, range(3), options)) == 4


def vars_of(entry: ServerEntry) -> dict[str, object]:
    return {name: getattr(entry, name) for name in entry.__dataclass_fields__}


def test_the_first_option_is_the_least() -> None:
    servers = [server("a", 0, 3)]
    assert counted(best_schedule(servers, range(3), [chunks(4), chunks(8)])) == 4
