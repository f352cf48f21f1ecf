from __future__ import annotations

import pytest
import torch

from swarm_plugins.adapter_spec import AdapterSpec
from swarm_plugins.block_io import PAGE_TOKENS, LoadedAdapter
from swarm_plugins.blocks.kv import BlockKV, KVCache, KVPool
from swarm_plugins.errors import CapacityError
from swarm_plugins.server.failures import RequestError
from swarm_plugins.server.state.activations import ActivationStore
from swarm_plugins.server.state.adapter_store import AdapterStore
from swarm_plugins.server.state.points import Points
from swarm_plugins.server.state.prefixes import PrefixStore
from swarm_plugins.server.state.shares import STALE_S, Shares


@pytest.fixture
def points() -> Points:
    """Alice and Carol call from addresses of their own, the mallorys from one."""
    points = Points()
    for peer, host in (("alice", "10.0.0.1"), ("carol", "10.0.0.2"), *((f"mallory{i}", "10.6.6.6") for i in range(50))):
        points.met(peer, f"/ip4/{host}/tcp/1")
    return points


def adapter(digest: str, num_bytes: int) -> LoadedAdapter:
    return LoadedAdapter(digest=digest, spec=AdapterSpec(modules=()), tensors=(torch.zeros(num_bytes // 4),))


def test_identities_of_one_address_push_out_only_their_own_graphs(points: Points) -> None:
    """Fifty that held little each pushed out all that one client kept for its backward passes."""
    store: ActivationStore[str] = ActivationStore(100, groups=points)
    hers = [store.put("alice", f"graph {index}", 20) or "" for index in range(2)]
    for round_ in range(3):
        for index in range(50):
            assert store.put(f"mallory{index}", f"graph {round_}", 5)
    assert [store.take("alice", ticket) for ticket in hers] == [("graph 0",), ("graph 1",)]


def test_identities_of_one_address_push_out_only_their_own_adapters(points: Points) -> None:
    """Two of them had every other client upload its adapter again with each step."""
    store = AdapterStore(100, groups=points, object_bytes=0)
    store.put("alice", adapter("hers", 40))
    for index in range(50):
        store.put(f"mallory{index}", adapter(str(index), 48))
    with store.using("alice", ["hers"]):
        pass


def test_adapters_in_use_at_one_address_leave_room_for_others(points: Points) -> None:
    store = AdapterStore(100, groups=points, object_bytes=0)
    store.put("mallory0", adapter("a", 48))
    with store.using("mallory0", ["a"]):
        with pytest.raises(CapacityError, match=r"no room for an adapter of 48 bytes: 48 of 100 bytes are held"):
            store.put("mallory1", adapter("b", 48))
        store.put("alice", adapter("hers", 48))
    with store.using("alice", ["hers"]):
        pass


def test_one_client_s_pages_do_not_push_out_another_s(points: Points) -> None:
    """Some prompts of one client had all others compute what they had begun with again."""
    layout = BlockKV(key_heads=1, key_width=8, value_heads=1, value_width=8, dtype=torch.float32)
    page_bytes = PAGE_TOKENS * (layout.token_bytes + 4 * 4)
    pool = KVPool(1 << 20)
    prefixes = PrefixStore(pool, points)
    cache = KVCache(pool, {0: layout}, range(1), 1, torch.device("cpu"))
    cache.reserve(PAGE_TOKENS)
    cache.advance(PAGE_TOKENS)
    pool.reserve(pool.free_bytes - 6 * page_bytes)
    begun, outputs = prefixes.begun("alice", range(1), 1), torch.randn(1, PAGE_TOKENS, 4)
    for name in (b"hers 0", b"hers 1"):
        prefixes.keep("alice", cache, begun, [name], outputs)
    for index in range(50):
        prefixes.keep(f"mallory{index}", cache, begun, [b"%d" % index], outputs)
    assert prefixes.num_bytes == 6 * page_bytes
    # Sessions take two pages more: those of who holds most give way.
    pool.reserve(2 * page_bytes)
    for name in (b"hers 0", b"hers 1"):
        cache.crop(0)
        assert len(prefixes.restore(cache, [name])) == 1


def test_what_was_not_used_for_long_goes_before_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("swarm_plugins.server.state.shares.time.monotonic", lambda: now)
    shares: Shares[str] = Shares()
    shares.add("old", "alice", 1)
    now += STALE_S + 1
    shares.add("new", "bob", 10)
    assert shares.first("bob", 10) == "old"
    shares.touch("old")
    assert shares.first("bob", 10) == "new"


def test_a_peer_that_becomes_known_keeps_its_group_while_it_holds_anything(points: Points) -> None:
    shares: Shares[str] = Shares(points)
    shares.add("a", "mallory0", 5)
    shares.hold("a")
    points.earned("mallory0", 100)
    shares.add("b", "mallory0", 5)
    assert (shares.in_use("mallory1"), shares.held("mallory0")) == (5, 10)
    shares.let_go("a")
    for key in ("a", "b"):
        shares.remove(key)
    assert (shares.num_bytes, shares.group("mallory0")) == (0, "mallory0")
    assert not any((shares._of_group, shares._in_use, shares._lines, shares._group_of))


def test_an_adapter_that_is_gone_is_unknown(points: Points) -> None:
    store = AdapterStore(100, groups=points, object_bytes=0)
    for digest in ("a", "b", "c"):
        store.put("alice", adapter(digest, 24))
    with pytest.raises(RequestError, match="upload it"), store.using("alice", ["a"]):
        raise AssertionError
