from __future__ import annotations

import gc
import weakref

import pytest
import torch

from swarm_plugins.errors import ConfigError
from swarm_plugins.server.state.activations import SAVED_BYTES, ActivationStore, GraphMeter


def test_meter_counts_each_storage_once_and_no_weights() -> None:
    weight = torch.randn(64, 64)
    hidden = torch.randn(8, 64, requires_grad=True)
    meter = GraphMeter(1 << 20, {weight.untyped_storage().data_ptr()}, saved_bytes=0)
    with meter.recording():
        out = (hidden @ weight).tanh() * 2  # tanh saves its output; the product with a number saves nothing
        both = out * out  # saves one tensor twice
    # matmul saves hidden's storage only for weights that need gradients: tanh's output and `out` remain.
    assert meter.num_bytes == 2 * 8 * 64 * 4
    assert not meter.is_over
    both.sum().backward()
    assert hidden.grad is not None


def test_meter_releases_what_outgrows_the_limit() -> None:
    hidden = torch.randn(64, 64, requires_grad=True)
    meter = GraphMeter(3 * 64 * 64 * 4, (), saved_bytes=0)
    with meter.recording():
        out = hidden
        refs = []
        for _ in range(8):
            out = out.tanh()
            refs.append(weakref.ref(out))
    gc.collect()
    assert meter.is_over
    with pytest.raises(RuntimeError, match="outgrew its budget"):
        out.sum().backward()


def test_oldest_goes_first_and_ticket_works_once() -> None:
    store: ActivationStore[str] = ActivationStore(100)
    tickets = [store.put("alice", f"graph {i}", 40) for i in range(3)]
    assert store.used_bytes == 80
    assert [store.take("alice", ticket or "") for ticket in tickets] == [None, ("graph 1",), ("graph 2",)]
    assert store.take("alice", tickets[1] or "") is None
    assert store.used_bytes == 0


def test_ticket_of_another_peer_is_unknown_and_stays() -> None:
    store: ActivationStore[str] = ActivationStore(100)
    ticket = store.put("alice", "graph", 10) or ""
    assert store.take("mallory", ticket) is None
    assert store.take("alice", ticket) == ("graph",)


def test_larger_than_the_budget_is_not_kept() -> None:
    store: ActivationStore[str] = ActivationStore(100)
    kept = store.put("alice", "small", 100)
    assert store.put("alice", "large", 101) is None
    assert store.take("alice", kept or "") == ("small",)


def test_expired_graphs_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("swarm_plugins.server.state.activations.time.monotonic", lambda: now)
    store: ActivationStore[str] = ActivationStore(100, ttl_s=5.0)
    ticket = store.put("alice", "graph", 10) or ""
    now = 1005.0
    store.drop_expired()
    assert len(store) == 0
    assert store.take("alice", ticket) is None


def test_what_is_in_use_counts_until_its_end() -> None:
    store = ActivationStore[str](100)
    ticket = store.put("alice", "graph", 60)
    with store.using("alice", ticket) as values:
        assert values == ("graph",)
        assert store.used_bytes == 60
        assert store.put("bob", "no room", 50) is None
        small = store.put("bob", "small", 40)
        assert store.put("bob", "grown", 10, ticket=small) is None
        assert store.take("bob", small or "") is None
        store.clear()
        assert store.used_bytes == 60
        with store.using("alice", ticket) as again:
            assert again is None
    assert store.used_bytes == 0
    kept = store.put("bob", "all", 100)
    with store.using("mallory", kept) as stolen, store.using("bob", None) as nothing:
        assert stolen is nothing is None
    assert store.take("bob", kept or "") == ("all",)


def test_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 or more bytes, got -1"):
        ActivationStore(-1)


def test_a_flood_of_one_peer_pushes_out_only_its_own() -> None:
    store = ActivationStore[str](100)
    victim = store.put("victim", "v", 40)
    flood = [store.put("flood", str(number), 10) for number in range(50)]
    assert victim is not None
    assert store.take("victim", victim) == ("v",)
    assert [store.take("flood", ticket) for ticket in flood if ticket][-6:] == [
        (str(number),) for number in range(44, 50)
    ]


def test_a_newcomer_gets_room_from_the_peer_that_holds_most() -> None:
    store = ActivationStore[str](100)
    first = [store.put("first", str(number), 25) for number in range(4)]
    newcomer = store.put("newcomer", "n", 50)
    assert newcomer is not None
    assert [store.take("first", ticket) for ticket in first if ticket] == [None, None, ("2",), ("3",)]
    assert store.take("newcomer", newcomer) == ("n",)


def test_values_of_a_ticket_are_kept_together_or_not_at_all() -> None:
    store = ActivationStore[str](100)
    ticket = store.put("alice", "one", 40)
    assert store.put("alice", "two", 40, ticket=ticket) == ticket
    assert store.take("alice", ticket or "") == ("one", "two")
    # Larger than the budget together; others keep theirs.
    other = store.put("bob", "theirs", 10)
    ticket = store.put("alice", "one", 60)
    assert store.put("alice", "two", 60, ticket=ticket) is None
    assert store.take("alice", ticket or "") is None
    assert store.put("alice", "three", 1, ticket=ticket) is None
    assert store.take("bob", other or "") == ("theirs",)


def test_who_grows_greediest_gives_its_own_up() -> None:
    store = ActivationStore[str](100)
    other = store.put("bob", "theirs", 30)
    ticket = store.put("alice", "one", 60)
    assert store.put("alice", "two", 30, ticket=ticket) is None
    assert store.used_bytes == 30
    assert store.take("bob", other or "") == ("theirs",)


def test_a_graph_counts_its_nodes() -> None:
    """Graphs of one token took forty times what they counted for: 10 GB under a budget of 256 MiB."""
    row = torch.ones(1, requires_grad=True)
    meter = GraphMeter(1 << 20, ())
    with meter.recording():
        out = row
        for _ in range(100):
            out = out.tanh()
    assert meter.num_bytes == 100 * (SAVED_BYTES + 4)
