"""The part of an address by which strangers are told apart: identities cost nothing, addresses do."""

from __future__ import annotations

from typing import NamedTuple

_IP4, _IP6 = 0x04, 0x29  # codes of multiaddr


class Origin(NamedTuple):
    """The part of an address that a stranger cannot change at will."""

    host: bytes
    """An IPv4 address, or 64 bits of an IPv6 address; empty: unknown."""
    network: bytes
    """24 or 48 bits of it."""


UNKNOWN = Origin(b"", b"")


def origin_of(address: bytes) -> Origin:
    """Returns the origin in a binary multiaddr."""
    if len(address) >= 5 and address[0] == _IP4:
        return Origin(address[1:5], address[1:4])
    if len(address) >= 17 and address[0] == _IP6:
        return Origin(address[1:9], address[1:7])
    return UNKNOWN
