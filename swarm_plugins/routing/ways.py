"""How long outputs are on their way from one server to another.

A server may lie about its distances to get more work. So a distance counts only if both ends announce it, as the longer
of their figures, and as no shorter than the triangle with the client permits.

Letters: ``M`` servers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np


class Placed(Protocol):
    """A server and its distances."""

    @property
    def peer(self) -> str:
        """Its id."""

    @property
    def round_trip_s(self) -> float:
        """Measured seconds of an empty request of this client and its answer."""

    @property
    def round_trips(self) -> Mapping[str, float]:
        """Announced seconds of the same between it and other servers, by their ids."""


def way_s(one: Placed, two: Placed) -> float:
    """Returns the seconds from one server to another: by the client, unless both announce a shorter way."""
    by_client_s = (one.round_trip_s + two.round_trip_s) / 2
    there, back = one.round_trips.get(two.peer), two.round_trips.get(one.peer)
    if there is None or back is None:
        return by_client_s
    least_s = abs(one.round_trip_s - two.round_trip_s)
    return min(max(there, back, least_s) / 2, by_client_s)


def direct_ways(servers: Sequence[Placed], closed: Collection[tuple[str, str]]) -> np.ndarray | None:
    """Returns `way_s` from each server to each other one, ``[M, M]``, infinity for ``closed`` pairs.

    None: none is known to be shorter than by the client.
    """
    index = {server.peer: number for number, server in enumerate(servers)}
    half_s = np.array([server.round_trip_s for server in servers]) / 2
    by_client_s = half_s[:, None] + half_s
    ways = by_client_s.copy()
    for row, one in enumerate(servers):
        for peer in one.round_trips:
            if (column := index.get(peer)) is not None:
                ways[row, column] = way_s(one, servers[column])
    if (ways == by_client_s).all():
        return None
    for sender, receiver in closed:
        if sender in index and receiver in index:
            ways[index[sender], index[receiver]] = np.inf
    return ways
