"""Whose turn it is: peers take turns, however much one of them asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from swarm_plugins.server.compute.work import Work

__all__ = ["Turns"]

W = TypeVar("W", bound=Work)

_MAX_PEERS = 1024
"""Peers whose last turn is remembered; who is forgotten counts as one who has waited for long."""


class Turns:
    """Orders waiting work so that no peer's flood keeps others waiting. Belongs to one thread."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._num_turns = 0

    def order(self, waiting: Sequence[W]) -> list[W]:
        """Returns the first item of each peer, then the second of each, and so on.

        Within a round those come first who have not had a turn for longest; equals stay as they are.
        """
        if not waiting or all(item.peer == waiting[0].peer for item in waiting):
            return list(waiting)
        seen: Counter[str] = Counter()
        keys = []
        for item in waiting:
            keys.append((seen[item.peer], self._last.get(item.peer, 0)))
            seen[item.peer] += 1
        order = sorted(range(len(waiting)), key=keys.__getitem__)
        return [waiting[index] for index in order]

    def had(self, peers: set[str]) -> None:
        """Notes that these peers have just had a turn."""
        self._num_turns += 1
        for peer in peers:
            # Re-inserted at the end, so that the first one is the one to forget.
            self._last.pop(peer, None)
            self._last[peer] = self._num_turns
        while len(self._last) > _MAX_PEERS:
            del self._last[next(iter(self._last))]
