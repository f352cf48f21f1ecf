"""Whose work runs next: peers get shares of the tokens that run here, whatever number of requests they send.

Start-time fair queueing (Goyal, Vin and Cheng 1996), which is deficit round robin with a deficit per token: each
peer's work advances its clock by tokens over weight, and the peer whose clock is furthest behind goes next. A peer that
comes or comes back starts at the present: idle time earns nothing. Peers share at two levels: groups by their weight,
and in a group each peer alike. A peer with points is a group of its own, newcomers of one address are one together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from swarm_plugins.fair_queueing import Clocks
from swarm_plugins.recent import Recent
from swarm_plugins.server.state.points import Points


class Waiting(Protocol):
    """Work that waits for its turn."""

    peer: str

    @property
    def num_tokens(self) -> int:
        """Tokens that it will run."""


W = TypeVar("W", bound=Waiting)


class Turns:
    """Orders waiting work. Belongs to one thread."""

    def __init__(self, points: Points) -> None:
        self._points = points
        self._groups = Clocks()
        self._peers = Recent[str, Clocks]()

    def order(self, waiting: Sequence[W]) -> list[W]:
        """Returns all work in the order in which it should run; a peer's own keeps its order."""
        if not waiting or all(item.peer == waiting[0].peer for item in waiting):
            return list(waiting)
        groups: dict[str, dict[str, list[W]]] = {}
        for item in waiting:
            groups.setdefault(self._points.group(item.peer), {}).setdefault(item.peer, []).append(item)
        lines = {group: _merged(self._clocks(group), peers) for group, peers in groups.items()}
        return _merged(self._groups, lines, self._points.weight)

    def had(self, peer: str, num_tokens: int) -> None:
        """Notes that tokens of a peer run."""
        group = self._points.group(peer)
        self._groups.advance(group, num_tokens / self._points.weight(group))
        self._clocks(group).advance(peer, num_tokens)

    def _clocks(self, group: str) -> Clocks:
        found = self._peers[group] = self._peers.get(group) or Clocks()
        return found


def _merged(
    clocks: Clocks, lines: Mapping[str, Iterable[W]], weight: Callable[[str], float] = lambda _: 1.0
) -> list[W]:
    """Merges the names' lines of work by the time at which each piece would start; equals keep their order."""
    tagged: list[tuple[float, W]] = []
    for name, line in lines.items():
        start = clocks.start(name)
        for item in line:
            tagged.append((start, item))
            start += item.num_tokens / weight(name)
    return [item for _, item in sorted(tagged, key=lambda pair: pair[0])]
