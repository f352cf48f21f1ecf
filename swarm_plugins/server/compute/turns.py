"""Whose work runs next: peers get shares of the tokens that run here, whatever number of requests they send.

Start-time fair queueing (Goyal, Vin and Cheng 1996), which is deficit round robin with a deficit per token: each
peer's work advances its clock by tokens over weight, and the peer whose clock is furthest behind goes next. A peer that
comes or comes back starts at the present: idle time earns nothing. Peers share at two levels: groups by their weight,
and in a group each peer alike. A peer with points is a group of its own, newcomers of one address are one together.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from swarm_plugins.recent import Recent

_MAX_CLOCKS = 4096
"""Clocks remembered; a forgotten one starts at the present."""


class Standing(Protocol):
    """How peers stand to each other."""

    def group(self, peer: str) -> str:
        """Returns the group in which a peer shares its turns."""

    def weight(self, group: str) -> float:
        """Returns a group's weight, 1 for newcomers."""

    def served(self, peer: str, work: int) -> None:
        """Notes work that has been done for a peer: tokens times blocks."""


class Waiting(Protocol):
    """Work that waits for its turn."""

    peer: str

    @property
    def num_tokens(self) -> int:
        """Tokens that it will run."""


W = TypeVar("W", bound=Waiting)


class _Clocks:
    """How much each of some names has had, and where a new one starts."""

    def __init__(self) -> None:
        self._at: Recent[str, float] = Recent(_MAX_CLOCKS)
        self._present = 0.0

    def at(self, name: str) -> float:
        return max(self._at.get(name, 0.0), self._present)

    def advance(self, name: str, amount: float) -> None:
        start = self.at(name)
        self._present = start
        self._at[name] = start + amount


class Turns:
    """Orders waiting work. Belongs to one thread."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._groups = _Clocks()
        self._peers: Recent[str, _Clocks] = Recent(_MAX_CLOCKS)

    def order(self, waiting: Sequence[W]) -> list[W]:
        """Returns all work in the order in which it should run; a peer's own keeps its order."""
        if not waiting or all(item.peer == waiting[0].peer for item in waiting):
            return list(waiting)
        by_group: dict[str, dict[str, deque[W]]] = {}
        for item in waiting:
            peers = by_group.setdefault(self._standing.group(item.peer), {})
            peers.setdefault(item.peer, deque()).append(item)
        lines = {group: _merged(peers, self._clocks(group)) for group, peers in by_group.items()}
        # The second entry keeps equals in the order in which they came.
        heap = [(self._groups.at(group), index, group) for index, group in enumerate(lines)]
        heapq.heapify(heap)
        ordered: list[W] = []
        while heap:
            clock, index, group = heap[0]
            try:
                item = next(lines[group])
            except StopIteration:
                heapq.heappop(heap)
                continue
            ordered.append(item)
            heapq.heapreplace(heap, (clock + item.num_tokens / self._standing.weight(group), index, group))
        return ordered

    def had(self, peer: str, num_tokens: int) -> None:
        """Notes that tokens of a peer run."""
        group = self._standing.group(peer)
        self._groups.advance(group, num_tokens / self._standing.weight(group))
        self._clocks(group).advance(peer, num_tokens)

    def _clocks(self, group: str) -> _Clocks:
        found = self._peers[group] = self._peers.get(group) or _Clocks()
        return found


def _merged(peers: dict[str, deque[W]], clocks: _Clocks) -> Iterator[W]:
    """Yields the work of a group's peers, always of the one that has had least."""
    heap = [(clocks.at(peer), index, peer) for index, peer in enumerate(peers)]
    heapq.heapify(heap)
    while heap:
        clock, index, peer = heap[0]
        item = peers[peer].popleft()
        if peers[peer]:
            heapq.heapreplace(heap, (clock + item.num_tokens, index, peer))
        else:
            heapq.heappop(heap)
        yield item
