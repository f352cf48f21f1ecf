"""Many clients that choose for themselves spread over servers that are alike, and leave busy ones to those there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from client_kit import server_info

from swarm_plugins.book import judging
from swarm_plugins.book.record import PeerBook, Said
from swarm_plugins.routing import Demand, ServerEntry, plan

NUM_CLIENTS = 30
SPANS = [(0, 4), (4, 8), (8, 12)]


def servers(**slower: float) -> list[ServerEntry]:
    """Returns three servers for each span, alike but for those that are named."""
    return [
        ServerEntry(
            peer=(peer := f"{name}{start}"),
            start=start,
            end=end,
            round_trip_s=0.02,
            step_s=0.005 * slower.get(peer, 1.0),
            throughput=1e4,
            free_kv_tokens=10**6,
        )
        for start, end in SPANS
        for name in "abc"
    ]


def chosen(client: int, entries: list[ServerEntry], loads: Mapping[str, float]) -> list[str]:
    book = PeerBook()
    for peer, load in loads.items():
        book.observe(peer, Said(server_info(0, 1, 1, load=load)))
    chain = plan(judging.believed(book, entries), range(12), Demand(kv_tokens=100), seed=client)
    assert chain is not None
    return [span.peer for span in chain]


@pytest.mark.parametrize("slower", [1.0, 1.04], ids=["alike", "almost"])
def test_clients_that_come_at_once_do_not_take_the_same_chain(slower: float) -> None:
    entries = servers(a0=slower, b4=slower)
    counts = Counter(peer for client in range(NUM_CLIENTS) for peer in chosen(client, entries, {}))
    assert len(counts) == len(entries)
    assert max(counts.values()) <= NUM_CLIENTS * 2 / 3


def test_a_busy_server_is_left_where_another_one_is_idle() -> None:
    counts = Counter(
        peer for client in range(NUM_CLIENTS) for peer in chosen(client, servers(), {"a0": 0.4, "b4": 0.4})
    )
    assert not {"a0", "b4"} & counts.keys()
    assert min(counts.values()) >= NUM_CLIENTS / 10


def test_clients_that_come_one_after_the_other_share_servers_by_their_speed() -> None:
    entries = servers(a0=0.5)
    loads: Counter[str] = Counter()
    for client in range(NUM_CLIENTS):
        for peer in chosen(client, entries, {peer: count / NUM_CLIENTS for peer, count in loads.items()}):
            loads[peer] += 1
    assert max(loads[peer] for peer in ("b0", "c0")) < loads["a0"] <= NUM_CLIENTS * 2 / 3
    assert all(NUM_CLIENTS / 5 <= loads[f"{name}{start}"] <= NUM_CLIENTS / 2 for name in "abc" for start in (4, 8))
