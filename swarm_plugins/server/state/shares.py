"""What a server keeps for its clients under one budget, and what of it goes first when there is no more room.

The oldest of who holds most goes first, so that nobody displaces what others keep by keeping more, under however many
identities: as in `Turns`, newcomers of one address are one together. What was not used for `STALE_S` goes before all
else, whoever holds it.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from swarm_plugins.ledger import Groups

STALE_S = 300.0
"""Who has been away for so long keeps nothing that others need the room of."""

K = TypeVar("K", bound=Hashable)


class _Kept(NamedTuple):
    peer: str
    group: str
    num_bytes: int


class Shares(Generic[K]):
    """Sums of what each peer and group holds, and the order in which it goes; nothing looks at all that is kept.

    Args:
        groups: Which peers share. None: each counts by itself.
    """

    def __init__(self, groups: Groups | None = None) -> None:
        self.num_bytes = 0
        """Of all."""
        self._groups = groups
        self._kept: dict[K, _Kept] = {}
        self._idle: OrderedDict[K, float] = OrderedDict()
        """When what is not in use was used last; the oldest first."""
        self._lines: dict[str, dict[str, OrderedDict[K, None]]] = {}
        """The same by group and peer."""
        self._of_group: Counter[str] = Counter()
        self._of_peer: Counter[str] = Counter()
        self._group_of: dict[str, str] = {}
        """A peer keeps its group while it holds anything, as in a `Ledger`."""
        self._in_use: Counter[str] = Counter()
        """Bytes that are in use, by group."""
        self._num_of: Counter[str] = Counter()

    def __len__(self) -> int:
        """Returns the number of things that are kept."""
        return len(self._kept)

    def __contains__(self, key: K) -> bool:
        """Returns whether something is kept."""
        return key in self._kept

    def group(self, peer: str) -> str:
        """Returns the group of a peer."""
        return self._group_of.get(peer) or (peer if self._groups is None else self._groups.group(peer))

    def held(self, peer: str) -> int:
        """Returns the bytes of a peer."""
        return self._of_peer[peer]

    def in_use(self, peer: str) -> int:
        """Returns the bytes in use of all peers of a peer's group."""
        return self._in_use[self.group(peer)]

    def add(self, key: K, peer: str, num_bytes: int) -> None:
        """Notes what is kept from now on, the most recently used of its peer."""
        group = self._group_of[peer] = self.group(peer)
        one = self._kept[key] = _Kept(peer, group, num_bytes)
        self._num_of[peer] += 1
        self._count(one, num_bytes)
        self._lay(key, one)

    def grow(self, key: K, num_bytes: int) -> None:
        """Notes that what is kept has become larger, and was used."""
        one = self._kept[key]
        self._take(key, one)
        self._count(one, num_bytes)
        one = self._kept[key] = one._replace(num_bytes=one.num_bytes + num_bytes)
        self._lay(key, one)

    def touch(self, key: K) -> None:
        """Notes that something was used."""
        if key in self._idle:
            one = self._kept[key]
            self._take(key, one)
            self._lay(key, one)

    def hold(self, key: K) -> None:
        """Notes that something is in use, and stays."""
        one = self._kept[key]
        self._take(key, one)
        self._in_use[one.group] += one.num_bytes

    def let_go(self, key: K) -> None:
        """Notes that something is not in use any more."""
        one = self._kept[key]
        self._lay(key, one)
        self._in_use[one.group] -= one.num_bytes
        if not self._in_use[one.group]:
            del self._in_use[one.group]

    def remove(self, key: K) -> None:
        """Forgets what is not in use."""
        one = self._kept.pop(key)
        self._take(key, one)
        self._count(one, -one.num_bytes)
        self._num_of[one.peer] -= 1
        if not self._num_of[one.peer]:
            del self._num_of[one.peer], self._of_peer[one.peer], self._group_of[one.peer]

    def first_of(self, peer: str) -> K | None:
        """Returns what of a peer goes first; None if all of it is in use."""
        line = self._lines.get(self.group(peer), {}).get(peer)
        return next(iter(line)) if line else None

    def first(self, peer: str = "", num_bytes: int = 0) -> K | None:
        """Returns what goes first, so that ``peer`` can keep ``num_bytes`` more; None if all is in use."""
        if not self._idle:
            return None
        oldest, used_at = next(iter(self._idle.items()))
        if time.monotonic() - used_at > STALE_S:
            return oldest
        own = self.group(peer) if peer else ""
        group = max(self._lines, key=lambda one: self._of_group[one] + (num_bytes if one == own else 0))
        line = max(
            self._lines[group].items(),
            key=lambda pair: self._of_peer[pair[0]] + (num_bytes if pair[0] == peer else 0),
        )[1]
        return next(iter(line))

    def _count(self, one: _Kept, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._of_group[one.group] += num_bytes
        self._of_peer[one.peer] += num_bytes
        if not self._of_group[one.group]:
            del self._of_group[one.group]

    def _lay(self, key: K, one: _Kept) -> None:
        self._idle[key] = time.monotonic()
        self._lines.setdefault(one.group, {}).setdefault(one.peer, OrderedDict())[key] = None

    def _take(self, key: K, one: _Kept) -> None:
        del self._idle[key]
        peers = self._lines[one.group]
        del peers[one.peer][key]
        if not peers[one.peer]:
            del peers[one.peer]
        if not peers:
            del self._lines[one.group]
