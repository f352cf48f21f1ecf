"""Addresses are read as hivemind reads them, without its import."""

from __future__ import annotations

import pytest
from hivemind.utils.multiaddr import Multiaddr

from swarm_plugins.errors import ConfigError
from swarm_plugins.transport.reach.addresses import check_address, check_peer_ids, peer_id_in, place_in

PEER = "12D3KooWHTzWXxbE9AWiBme5J3Az76rw2KWvTFW2nRUwFGLbbjDn"
HASHED = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"


@pytest.mark.parametrize("peer", [PEER, HASHED])
@pytest.mark.parametrize(
    "place",
    [
        "/ip4/1.2.3.4/tcp/31337",
        "/ip4/1.2.3.4/udp/5/quic",
        "/ip6/2001:DB8::0:1/tcp/0",
        "/dns4/swarm.example.org/tcp/443/wss",
        f"/ip4/1.2.3.4/tcp/5/p2p/{HASHED}/p2p-circuit",
    ],
)
def test_place_and_peer_are_those_that_hivemind_reads(place: str, peer: str) -> None:
    for address in (f"{place}/p2p/{peer}", f"{place}/ipfs/{peer}/"):
        check_address(address)
        assert peer_id_in(address) == peer
        assert f"{place_in(address)}/p2p/{peer}" == str(Multiaddr(address))
    assert place_in(place) == str(Multiaddr(place))
    with pytest.raises(ConfigError, match="has no peer id"):
        peer_id_in(place)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("", "does not begin with /"),
        ("1.2.3.4:5", "does not begin with /"),
        ("/", "it is empty"),
        ("/ip4", "ip4 has no value"),
        ("/ip4/1.2.3/tcp/5", "Expected 4 octets in '1.2.3'"),
        ("/ip4/1.2.3.4/tcp/99999", "invalid port '99999': expected 0 to 65535"),
        ("/ip4/1.2.3.4/sctp6/5", "unknown protocol 'sctp6'"),
        ("/dns4//tcp/5", "invalid name ''"),
        (f"/p2p/{PEER}x", "invalid peer id"),
        (f"/p2p/{PEER[:-1]}", "invalid peer id"),
        ("/p2p/0OIl", "Invalid character"),
        (5, "not a libp2p address"),
    ],
)
def test_what_is_not_an_address_is_refused_with_the_reason(address: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_address(address)
    with pytest.raises((ValueError, LookupError, TypeError, AssertionError)):
        # Multiaddr takes an empty list of protocols.
        assert str(Multiaddr(address))


@pytest.mark.parametrize("peer", ["bob", "", "12D3KooW", PEER + "x", f"/p2p/{PEER}", 5])
def test_what_is_not_a_peer_id_is_refused(peer: str) -> None:
    check_peer_ids([PEER, HASHED])
    with pytest.raises(ConfigError, match=r"is not a peer id: expected 12D3Koo\.\.\. or Qm"):
        check_peer_ids([PEER, peer])
