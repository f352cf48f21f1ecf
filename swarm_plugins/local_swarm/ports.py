"""Ports that stay a local swarm's own while their server is down."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterable

_PLACE = re.compile(r"/ip4/([^/]+)/tcp/([1-9]\d*)(?:/|$)")


class HeldPorts:
    """Keeps the system from giving the ports of servers to others, from their first start until the swarm is closed.

    A server started again listens where its clients know it. In the seconds until it does, the system would give
    its port to any socket that asks for a free one. A socket that is bound to the port, but does not listen,
    prevents this: the server can still listen there, since libp2p sets SO_REUSEPORT, and whoever calls is refused.
    """

    def __init__(self) -> None:
        self._sockets: dict[tuple[str, int], socket.socket] = {}

    def hold(self, addresses: Iterable[str]) -> None:
        """Holds the TCP ports of multiaddresses, those that the system allows."""
        places = {(found[1], int(found[2])) for address in addresses if (found := _PLACE.match(address))}
        for place in places - self._sockets.keys():
            with contextlib.suppress(OSError):
                self._sockets[place] = _bound(place)

    def close(self) -> None:
        """Gives all ports back. Idempotent."""
        while self._sockets:
            self._sockets.popitem()[1].close()


def _bound(place: tuple[str, int]) -> socket.socket:
    with contextlib.ExitStack() as undo:
        one = undo.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            one.setsockopt(socket.SOL_SOCKET, option, 1)
        one.bind(place)
        undo.pop_all()
    return one
