"""Calls are counted for a peer, for an address, and for all: identities cost nothing."""

from __future__ import annotations

import asyncio

import pytest

from swarm_plugins.transport.admission import budgets
from swarm_plugins.transport.admission.addresses import UNKNOWN, ip_in, origin_of
from swarm_plugins.transport.admission.budgets import CallBudget, CallBudgets
from swarm_plugins.transport.admission.origins import Origins


def test_a_peer_has_a_burst_of_calls_then_so_many_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    budget = CallBudget(burst=3, per_s=2.0, clock=lambda: now)
    assert [budget.take("a") for _ in range(4)] == [True, True, True, False]
    assert budget.take("b")
    now = 1.0
    assert [budget.take("a") for _ in range(3)] == [True, True, False]
    now = 1e9
    assert [budget.take("a") for _ in range(4)] == [True, True, True, False]
    monkeypatch.setattr(budgets, "_MAX_CALLERS", 10)
    budget = CallBudget(burst=3, per_s=2.0)
    for index in range(100):
        budget.take(f"peer {index}")
    assert len(budget._buckets) == 10


def test_many_identities_of_an_address_have_one_budget() -> None:
    budgets = CallBudgets(clock=lambda: 0.0)
    here, there = origin_of(b"\x04\x01\x02\x03\x04\x06"), origin_of(b"\x04\x01\x02\x03\x05\x06")
    refusals = [budgets.refusal(f"sybil {index}", here) for index in range(4200)]
    assert refusals.count(None) == 500
    assert refusals[-1] == "more than 50 calls of the DHT a second of one address"
    assert budgets.refusal("honest", there) is None


def test_many_addresses_of_a_network_have_one_budget() -> None:
    budgets = CallBudgets(clock=lambda: 0.0)
    addresses = [origin_of(bytes([0x29, *range(6), 0, index % 200, *range(8)])) for index in range(4200)]
    refusals = [budgets.refusal(f"sybil {index}", address) for index, address in enumerate(addresses)]
    assert refusals.count(None) == 1000
    assert refusals[-1] == "more than 100 calls of the DHT a second of one network"
    assert budgets.refusal("honest", origin_of(b"\x04\x01\x02\x03\x05\x06")) is None


def test_all_callers_have_one_budget() -> None:
    budgets = CallBudgets(clock=lambda: 0.0)
    refusals = [budgets.refusal(f"sybil {index}", origin_of(bytes([4, 1, 1, index % 200, 1]))) for index in range(4200)]
    assert refusals.count(None) == 2000
    assert refusals[-1] == "more than 250 calls of the DHT a second of all peers"


def test_origins_are_read_from_addresses() -> None:
    assert origin_of(bytes([0x04, 10, 1, 2, 3, 0x06, 0, 1])) == (bytes([10, 1, 2, 3]), bytes([10, 1, 2]))
    assert origin_of(bytes([0x29, *range(16), 0x06, 0, 1])) == (bytes(range(8)), bytes(range(6)))
    assert origin_of(b"") == origin_of(b"\x04\x01") == origin_of(b"\x35abc") == UNKNOWN
    assert ip_in(bytes([0x04, 10, 1, 2, 3, 0x06, 0, 1])) == "/ip4/10.1.2.3"
    assert ip_in(bytes([0x29, *range(16), 0x06, 0, 1])) == "/ip6/1:203:405:607:809:a0b:c0d:e0f"
    assert ip_in(b"") == ip_in(b"\x04\x01") == ip_in(b"\x35abc") == ""


def test_long_answers_count_as_several_calls() -> None:
    now = 0.0
    budgets = CallBudgets(clock=lambda: now)
    here = origin_of(b"\x04\x01\x02\x03\x04\x06")
    for _ in range(3):
        assert budgets.refusal("peer", here) is None
        budgets.charge("peer", here, 3 << 20)
    assert budgets.refusal("peer", here) == "more than 10 calls of the DHT a second of one peer"
    now = 10.0
    assert budgets.refusal("peer", here) is None


async def test_the_daemon_is_asked_once_for_all_who_wait() -> None:
    asked = 0

    async def list_connections() -> list[tuple[str, bytes]]:
        nonlocal asked
        asked += 1
        return [(f"peer {index}", bytes([4, 10, 0, 0, index])) for index in range(100)]

    origins = Origins(list_connections)
    found = await asyncio.gather(*(origins.of(f"peer {index}") for index in range(200)))
    assert [origin.host for origin in found[:100]] == [bytes([10, 0, 0, index]) for index in range(100)]
    assert found[100:] == [UNKNOWN] * 100
    assert asked == 2
