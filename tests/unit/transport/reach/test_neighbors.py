"""What a node notes of its neighbors, which may be strangers at strange addresses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr

from swarm_plugins.transport.reach import neighbors
from swarm_plugins.transport.reach.addresses import peer_id_in

WEBTRANSPORT = b"\xd1\x03"
"""A protocol that hivemind does not know."""
FOUND = "/ip4/192.0.2.7/tcp/1"


def peer(number: int) -> PeerID:
    return PeerID(b"\x12\x20" + bytes([number]) * 32)


async def test_addresses_that_cannot_be_read_are_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    quic = Multiaddr("/ip4/192.0.2.7/udp/1/quic-v1").to_bytes()
    connections = [
        (1, quic + WEBTRANSPORT),
        (2, Multiaddr("/ip4/192.0.2.7/sctp/1").to_bytes()),  # hivemind knows it, the next node's config does not
        (3, quic + WEBTRANSPORT),
        (3, Multiaddr(FOUND).to_bytes()),
        (3, Multiaddr("/ip4/192.0.2.7/tcp/2").to_bytes()),
        (4, Multiaddr(FOUND).to_bytes()),
    ]

    async def list_connections(_: P2P) -> list[tuple[str, bytes]]:
        return [(peer(number).to_base58(), place) for number, place in connections]

    monkeypatch.setattr(neighbors, "list_connections", list_connections)
    table = SimpleNamespace(peer_id_to_uid={peer(number): None for number in (1, 2, 3)})
    dht: Any = SimpleNamespace(protocol=SimpleNamespace(routing_table=table))
    known = neighbors.Neighbors(SimpleNamespace(), "", dht, ())
    await known.note_addresses()
    assert known.addresses == (f"{FOUND}/p2p/{peer(3)}",)
    assert peer_id_in(known.addresses[0]) == peer(3).to_base58()
