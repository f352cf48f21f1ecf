from __future__ import annotations

import contextlib
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from swarm_plugins.adapter_spec import AdapterSpec
from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.errors import CapacityError, ConfigError
from swarm_plugins.server.failures import RequestError
from swarm_plugins.server.state.adapter_store import AdapterStore


def adapter(digest: str, num_bytes: int = 40) -> LoadedAdapter:
    return LoadedAdapter(digest=digest, spec=AdapterSpec(modules=()), tensors=(torch.zeros(num_bytes // 4),))


def is_held(store: AdapterStore, peer: str, digest: str) -> bool:
    with contextlib.suppress(RequestError), store.using(peer, [digest]):
        return True
    return False


def held(store: AdapterStore, *digests: str) -> list[str]:
    return [digest for digest in digests if is_held(store, "alice", digest) or is_held(store, "bob", digest)]


def test_least_recently_used_goes_first() -> None:
    store = AdapterStore(100, object_bytes=0, peer_bytes=100)
    store.put("alice", adapter("a"))
    store.put("alice", adapter("b"))
    held(store, "a")  # used, so that b is the oldest
    store.put("bob", adapter("c"))
    assert held(store, "a", "b", "c") == ["a", "c"]
    assert store.used_bytes == 80


def test_adapter_in_use_stays() -> None:
    store = AdapterStore(100, object_bytes=0, peer_bytes=100)
    store.put("alice", adapter("a"))
    store.put("alice", adapter("b"))
    with store.using("alice", ["a"]):
        store.put("bob", adapter("c"))
        with (
            store.using("bob", ["c"]),
            pytest.raises(CapacityError, match=r"no room .* 40 bytes: 80 of 100 bytes are held"),
        ):
            store.put("bob", adapter("d"))
    assert held(store, "a", "b", "c") == ["a", "c"]


def test_peer_pushes_out_only_its_own_beyond_its_share() -> None:
    store = AdapterStore(200, object_bytes=0, peer_bytes=80)
    store.put("bob", adapter("x"))
    for digest in ("a", "b", "c"):
        store.put("alice", adapter(digest))
    assert held(store, "x", "a", "b", "c") == ["x", "b", "c"]
    with pytest.raises(CapacityError, match="takes 84 bytes, one client may hold 80"):
        store.put("alice", adapter("d", 84))


def test_published_adapter_is_never_pushed_out() -> None:
    store = AdapterStore(40, object_bytes=0, peer_bytes=40)
    store.publish(adapter("host", 400))
    store.put("alice", adapter("a"))
    store.put("alice", adapter("b"))
    assert held(store, "host", "a", "b") == ["host", "b"]
    assert store.used_bytes == 40


def test_what_the_host_has_is_not_kept_again_for_a_client() -> None:
    store = AdapterStore(40, object_bytes=0)
    store.publish(adapter("host"))
    store.put("alice", adapter("host"))
    assert held(store, "host") == ["host"]
    assert store.used_bytes == 0


def test_what_the_host_withdraws_goes_unless_it_is_in_use() -> None:
    store = AdapterStore(100, object_bytes=0)
    for digest in ("kept", "used", "old"):
        store.publish(adapter(digest))
    store.put("alice", adapter("hers"))
    with store.using("bob", ["used"]):
        store.withdraw_all_but(["kept"])
    assert held(store, "kept", "used", "old", "hers") == ["kept", "used", "hers"]
    store.withdraw_all_but(["kept"])
    assert held(store, "kept", "used", "old", "hers") == ["kept", "hers"]


def test_a_digest_is_of_use_only_to_who_has_uploaded_it() -> None:
    store = AdapterStore(100, object_bytes=0)
    store.put("alice", adapter("a"))
    messages = []
    for digest in ("a", "b"):
        with pytest.raises(RequestError) as refused, store.using("bob", [digest]):
            pass
        messages.append(str(refused.value).replace(repr(digest), "?"))
    assert messages[0] == messages[1]  # nothing tells whether it is here
    store.put("bob", adapter("a"))
    store.put("bob", adapter("a"))
    assert store.used_bytes == 80
    with store.using("alice", ["a"]) as (hers,), store.using("bob", ["a"]) as (his,):
        assert hers is not his


def test_sums_by_owner_are_those_of_what_is_held() -> None:
    chance = random.Random(4)
    store = AdapterStore(400, object_bytes=0, peer_bytes=200)
    store.publish(adapter("host"))
    with contextlib.ExitStack() as uses:
        for _ in range(500):
            peer, digest = chance.choice(("alice", "bob", "carol")), str(chance.randrange(9))
            with contextlib.suppress(CapacityError, RequestError):
                if chance.random() < 0.5:
                    store.put(peer, adapter(digest, 4 * chance.randint(1, 20)))
                elif chance.random() < 0.7:
                    uses.enter_context(store.using(peer, [digest, digest, "host"]))
            if chance.random() < 0.1:
                uses.close()
            sizes = Counter[str]()
            for (owner, _), one in store._held.items():
                sizes[owner or "host"] += one.num_bytes
            del sizes["host"]
            assert {owner: store._shares.held(owner) for owner in sizes} == sizes
            assert store.used_bytes == sizes.total() <= 400
            assert max(sizes.values(), default=0) <= 200
    store.clear()
    assert store.used_bytes == 0


def test_an_upload_does_not_look_at_all_that_is_kept() -> None:
    """The event loop went through tens of thousands of adapters for each small upload."""

    class Unlisted(OrderedDict[Any, Any]):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("every adapter is looked at")

        items = values = keys = __iter__  # type: ignore[assignment]

    store = AdapterStore(100, object_bytes=0, peer_bytes=100)
    store._held, store._shares._kept = Unlisted(), Unlisted()
    for index in range(5):
        store.put("alice", adapter(str(index)))
    assert held(store, "2", "3", "4") == ["3", "4"]
    assert store.used_bytes == 80


def test_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 or more bytes, got -4"):
        AdapterStore(-4)
