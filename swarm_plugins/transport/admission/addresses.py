"""The part of an address by which strangers are told apart: identities cost nothing, addresses do."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

MAX_PEERS_PER_HOST = 64
"""Peers of one address (IPv4, or 64 bits of IPv6) that may have records, or a place in the routing table; peers of a
relay share the relay's."""

MAX_PEERS_PER_NETWORK = 256
"""Peers of one network (24 bits of IPv4, 48 bits of IPv6)."""

_K = TypeVar("_K")
_IP4, _IP6 = 0x04, 0x29  # codes of multiaddr


class Origin(NamedTuple):
    """The part of an address that a stranger cannot change at will."""

    host: bytes
    """An IPv4 address, or 64 bits of an IPv6 address; empty: unknown."""
    network: bytes
    """24 or 48 bits of it."""


UNKNOWN = Origin(b"", b"")


def crowd(origins: Mapping[_K, Origin], origin: Origin) -> list[_K]:
    """Returns who keeps another one of some origin out, in order; empty if its address and network have room."""
    for name, most in (("host", MAX_PEERS_PER_HOST), ("network", MAX_PEERS_PER_NETWORK)):
        found = [one for one, its in origins.items() if getattr(its, name) == getattr(origin, name)]
        if len(found) >= most:
            return found
    return []


def host_of(ip: str) -> str:
    """Returns the part of an IP address that a stranger cannot change at will, as text.

    That is an IPv4 address, also one mapped to IPv6, or a network of 64 bits of IPv6; empty if it is no IP address.
    """
    try:
        found = ipaddress.ip_address(ip.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv6Address):
        return str(found.ipv4_mapped or ipaddress.ip_network((int(found) >> 64 << 64, 64)))
    return str(found)


def ip_in(address: bytes) -> str:
    """Returns the IP address that a binary multiaddr begins with, as a multiaddr; empty if there is none.

    hivemind cannot read multiaddrs with protocols that it does not know, such as WebTransport.
    """
    if len(address) >= 5 and address[0] == _IP4:
        return f"/ip4/{ipaddress.IPv4Address(address[1:5])}"
    if len(address) >= 17 and address[0] == _IP6:
        return f"/ip6/{ipaddress.IPv6Address(address[1:17])}"
    return ""


def origin_of(address: bytes) -> Origin:
    """Returns the origin in a binary multiaddr."""
    if len(address) >= 5 and address[0] == _IP4:
        return Origin(address[1:5], address[1:4])
    if len(address) >= 17 and address[0] == _IP6:
        return Origin(address[1:9], address[1:7])
    return UNKNOWN
