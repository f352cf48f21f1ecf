"""Whose work runs next: peers get shares of the time of the compute thread, whatever number of requests they send.

Start-time fair queueing (Goyal, Vin and Cheng 1996): each peer's work advances its clock by seconds over weight, and
the peer whose clock is furthest behind goes next. What waits is estimated by its tokens and blocks, at the pace of what
ran lately; what has run is charged by the time that it took. So a message that costs little to send, and much to
compute, costs its sender its turns. A peer that comes starts at the present, and idle time earns next to nothing.
Peers share at two levels: groups by their weight, and in a group each peer alike. A peer with points is a group of its
own, newcomers of one address are one together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar, cast

from swarm_plugins.fair_queueing import Clocks
from swarm_plugins.recent import Recent
from swarm_plugins.server.state.points import Points

_MEMORY = 0.98
"""Part of what is known of the pace that each piece of work leaves."""


_CREDIT_S = 0.05
"""What idle time earns at most: a client that thinks between its steps goes before one that always has some waiting."""


class Waiting(Protocol):
    """Work that waits for its turn."""

    peer: str

    @property
    def work(self) -> int:
        """Tokens times blocks that it will run."""


W = TypeVar("W", bound=Waiting)


class Turns:
    """Orders waiting work. Belongs to one thread."""

    def __init__(self, points: Points) -> None:
        self._points = points
        self._groups = Clocks(_CREDIT_S)
        self._peers = Recent[str, Clocks]()
        self._seconds = self._work = 0.0

    @property
    def pace(self) -> float:
        """Seconds that a token takes in a block, on average of what ran lately; 0 if nothing has run."""
        return self._seconds / self._work if self._work else 0.0

    def order(self, waiting: Sequence[W], *, ahead: tuple[str, float] = ("", 0.0)) -> list[W]:
        """Returns all work in the order in which it should run; a peer's own keeps its order.

        Args:
            waiting: What waits.
            ahead: A peer whose work runs, and the seconds that it has had of it, which it has not been charged for.
        """
        if not waiting or all(item.peer == waiting[0].peer for item in waiting):
            return list(waiting)
        groups: dict[str, dict[str, list[W]]] = {}
        for item in waiting:
            groups.setdefault(self._points.group(item.peer), {}).setdefault(item.peer, []).append(item)
        pace, (peer, seconds) = self.pace, ahead
        lines = {group: _merged(self._clocks(group), peers, pace, {peer: seconds}) for group, peers in groups.items()}
        return _merged(self._groups, lines, pace, {self._points.group(peer): seconds}, self._points.weight)

    def before(self, current: Waiting, waiting: Sequence[W], had_s: float) -> list[W]:
        """Returns the waiting work that goes before ``current``, which has run for ``had_s`` seconds, in its order."""
        everything: list[Waiting] = [*waiting, current]
        order = self.order(everything, ahead=(current.peer, had_s))
        return cast("list[W]", order[: order.index(current)])

    def ran(self, work: int, seconds: float) -> None:
        """Learns from a run of tokens times blocks how long they take."""
        self._seconds = self._seconds * _MEMORY + seconds
        self._work = self._work * _MEMORY + work

    def had(self, peer: str, seconds: float) -> None:
        """Charges a peer for the time that it had, here and in its points."""
        if not peer:
            return
        group = self._points.group(peer)
        self._groups.advance(group, seconds / self._points.weight(group))
        self._clocks(group).advance(peer, seconds)
        if pace := self.pace:
            self._points.served(peer, seconds / pace)

    def _clocks(self, group: str) -> Clocks:
        found = self._peers[group] = self._peers.get(group) or Clocks(_CREDIT_S)
        return found


def _merged(
    clocks: Clocks,
    lines: Mapping[str, Iterable[W]],
    pace: float,
    ahead: Mapping[str, float],
    weight: Callable[[str], float] = lambda _: 1.0,
) -> list[W]:
    """Merges the names' lines of work by the time at which each piece would start; equals keep their order."""
    tagged: list[tuple[float, W]] = []
    for name, line in lines.items():
        start = clocks.start(name) + ahead.get(name, 0.0) / weight(name)
        for item in line:
            tagged.append((start, item))
            start += item.work * pace / weight(name)
    return [item for _, item in sorted(tagged, key=lambda pair: pair[0])]
