"""Which nodes a routing table takes: peers of one address, and of one network, have so many places."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.p2p import PeerID

from swarm_plugins.transport.admission import calls
from swarm_plugins.transport.admission.addresses import Origin
from swarm_plugins.transport.admission.calls import Admission, node_id_of


class Ways:
    """Tells the origins of peers by their names: ``a.b.c.d number``."""

    async def of(self, peer: str) -> Origin:
        host = bytes(map(int, PeerID.from_base58(peer).to_bytes().split()[0].split(b".")))
        return Origin(host, host[:3])


def peer(host: str, number: int) -> PeerID:
    return PeerID(f"{host} {number}".encode())


@pytest.fixture
def protocol() -> Any:
    table = RoutingTable(DHTID.generate(source="self"), bucket_size=20, depth_modulo=5)
    admission = Admission(Ways())  # type: ignore[arg-type]
    gone: set[PeerID] = set()

    async def call_ping(asked: PeerID, **_: Any) -> DHTID | None:
        if asked not in gone:
            return node_id_of(asked)
        del table[node_id_of(asked)]
        return None

    return SimpleNamespace(routing_table=table, record_validator=admission, call_ping=call_ping, gone=gone)


async def meet(protocol: Any, *peers: PeerID) -> list[bool]:
    found = []
    for one in peers:
        found.append(await protocol.record_validator.has_place(protocol, node_id_of(one), one))
        if found[-1]:
            protocol.routing_table.add_or_update_node(node_id_of(one), one)
    return found


async def test_identities_of_one_address_or_network_leave_room_for_others(protocol: Any) -> None:
    one_address = await meet(protocol, *(peer("2.2.2.2", number) for number in range(300)))
    assert one_address == [True] * 64 + [False] * 236
    assert await meet(protocol, peer("2.2.2.2", 0)) == [True], "it is there already"
    many = await meet(protocol, *(peer(f"2.2.2.{number % 200}", number) for number in range(400, 800)))
    assert many.count(True) == 256 - 64
    assert await meet(protocol, peer("3.3.3.3", 1)) == [True]
    assert len(protocol.routing_table.peer_id_to_uid) == 257


async def test_those_that_do_not_answer_leave_their_place(protocol: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_PAUSE_S", 0.0)
    crowd = [peer("2.2.2.2", number) for number in range(64)]
    await meet(protocol, *crowd)
    protocol.gone.add(crowd[20])
    newcomer = peer("2.2.2.2", 999)
    # Sixteen are asked each time.
    assert await meet(protocol, newcomer, newcomer, newcomer) == [False, False, True]
    assert crowd[20] not in protocol.routing_table


def test_the_table_has_a_bound(protocol: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_NODES", 5)
    asyncio.run(meet(protocol, *(peer(f"{number}.1.1.1", 0) for number in range(9))))
    assert len(protocol.routing_table.peer_id_to_uid) == 5
