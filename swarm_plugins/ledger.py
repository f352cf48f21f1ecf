"""What peers hold of a resource of this process: bytes of messages, streams, pages of a cache.

Nothing in here knows what is counted. A peer may hold ``s / (1 - s)`` times what is free: the share ``s`` of the limit
if it is alone, and less the more the others hold. So something always stays free for the next peer, however many fill
their shares (Choudhury and Hahne 1998, "Dynamic queue length thresholds for shared-memory packet switches").

Identities cost nothing, addresses do: the peers of one group (newcomers at one address) may together hold three times
as much as one of them.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

from swarm_plugins.errors import CapacityError, ConfigError


class BusyError(CapacityError):
    """No room for the moment; the same request fits when others, or earlier ones of the same peer, have ended."""


_PEERS_PER_GROUP = 3
"""A group may hold what so many peers could."""


class Groups(Protocol):
    """Which peers share what they may hold."""

    def calling(self, peer: str, address: str) -> AbstractContextManager[None]:
        """Notes the address that a peer calls from, at least while the ``with`` block runs."""

    def group(self, peer: str) -> str:
        """Returns the group of a peer; one that shares with no other is its own."""

    def is_known(self, peer: str) -> bool:
        """Returns whether a peer may take what is reserved."""


class Ledger:
    """Counts what each peer holds, before it is allocated. Used on one event loop.

    Args:
        limit: Most of all peers together.
        max_peer_share: Share of the limit that one peer may hold when the others hold nothing; 1 sets no bound.
        noun: What is counted, for messages.
        groups: Which peers share. None: each peer counts by itself, and none is known.
        reserved: Part of the limit that only known peers may take.
    """

    def __init__(
        self,
        limit: int,
        *,
        max_peer_share: float = 0.5,
        noun: str = "bytes",
        groups: Groups | None = None,
        reserved: int = 0,
    ) -> None:
        if limit < 1:
            raise ConfigError(f"the limit must be at least 1, got {limit}")
        if not 0 < max_peer_share <= 1:
            raise ConfigError(f"max_peer_share must be above 0 and at most 1, got {max_peer_share}")
        self.limit = limit
        self.max_peer_share = max_peer_share
        self.noun = noun
        self.groups = groups
        self.reserved = reserved if groups is not None else 0
        self.used = 0
        self._held: Counter[str] = Counter()
        self._held_by_group: Counter[str] = Counter()
        # A peer keeps its group while it holds anything: what is counted for a group is released there.
        self._group_of: dict[str, str] = {}

    @property
    def most_of_peer(self) -> int:
        """Most that one peer can hold."""
        return max(1, int(self.limit * self.max_peer_share))

    def held(self, peer: str) -> int:
        """Returns what a peer holds."""
        return self._held[peer]

    def group(self, peer: str) -> str:
        """Returns the group that a peer's claims count for."""
        return self._group_of.get(peer) or (peer if self.groups is None else self.groups.group(peer))

    def free(self, peer: str) -> int:
        """Returns what is free for a peer of its kind, whatever it holds already."""
        return max(0, self._left_for(peer))

    def room(self, peer: str) -> int:
        """Returns how much more a peer may claim now."""
        held, of_group = self._held[peer], self._held_by_group[self.group(peer)]
        return room_of(self.free(peer), held, of_group, self.max_peer_share)

    def room_after(self, peer: str, other: str, amount: int) -> int:
        """Returns how much more a peer could claim if another gave up ``amount``."""
        group = self.group(peer)
        of_group = self._held_by_group[group] - (amount if self.group(other) == group else 0)
        return room_of(max(0, self._left_for(peer) + amount), self._held[peer], of_group, self.max_peer_share)

    def _left_for(self, peer: str) -> int:
        """Returns what is left for peers of this kind; negative if known peers hold part of the reserve."""
        is_reserved = self.groups is not None and not self.groups.is_known(peer)
        return self.limit - self.used - (self.reserved if is_reserved else 0)

    def claim(self, peer: str, amount: int) -> None:
        """Counts ``amount`` more for a peer.

        Raises:
            BusyError: If there is no room now; nothing is counted then.
            CapacityError: If it is more than one peer can ever hold.
        """
        if not amount:
            return
        if amount > self.most_of_peer:
            raise CapacityError(
                f"{amount} {self.noun} are asked, one client can hold {self.most_of_peer} here: send less at once, "
                "or use a server that allows more"
            )
        if amount > self.room(peer):
            held, of_group = self._held[peer], self._held_by_group[self.group(peer)]
            others = f", those of its address {of_group}" if of_group > held else ""
            raise BusyError(
                f"this client holds {held} {self.noun} here{others} and all hold {self.used} of {self.limit}: "
                f"there is no room for {amount} more now; wait for answers and read them, or use another server"
            )
        group = self._group_of[peer] = self.group(peer)
        self.used += amount
        self._held[peer] += amount
        self._held_by_group[group] += amount

    def release(self, peer: str, amount: int) -> None:
        """Takes back a claim."""
        group = self.group(peer)
        self.used -= amount
        self._held[peer] -= amount
        self._held_by_group[group] -= amount
        if self._held[peer] <= 0:
            del self._held[peer]
            self._group_of.pop(peer, None)
        if self._held_by_group[group] <= 0:
            del self._held_by_group[group]

    def charge(self, peer: str) -> Charge:
        """Returns an account for one request of a peer."""
        return Charge(self, peer)


class Charge:
    """What one request holds; the end of the ``with`` block releases all of it."""

    def __init__(self, ledger: Ledger, peer: str) -> None:
        self.num_held = 0
        self.peer = peer
        self._ledger = ledger

    def claim(self, amount: int) -> None:
        """Counts more for the request; raises like `Ledger.claim`."""
        self._ledger.claim(self.peer, amount)
        self.num_held += amount

    def cover(self, amount: int) -> None:
        """Claims what is missing to hold ``amount``."""
        if amount > self.num_held:
            self.claim(amount - self.num_held)

    def adopt(self, amount: int) -> None:
        """Takes over what another charge of the same peer has claimed and given up without a release."""
        self.num_held += amount

    def keep_only(self, amount: int) -> None:
        """Releases all but ``amount``, which is held already."""
        surplus, self.num_held = self.num_held - amount, amount
        self._ledger.release(self.peer, surplus)

    def release(self) -> None:
        """Releases everything. Idempotent."""
        amount, self.num_held = self.num_held, 0
        if amount:
            self._ledger.release(self.peer, amount)

    def __enter__(self) -> Charge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def room_of(free: int, held: int, held_by_group: int, share: float) -> int:
    """Returns how much more a peer may take while ``free`` is left; see the module."""
    of_group = _PEERS_PER_GROUP * share / (1 + (_PEERS_PER_GROUP - 1) * share)
    return min(_room(free, held, share), _room(free, held_by_group, of_group))


def _room(free: int, held: int, share: float) -> int:
    if share >= 1:
        return max(0, free)
    ratio = share / (1 - share)
    # The most x with held + x <= ratio * (free - x); rounding must not take the last unit of a share, nor the first.
    most = int((ratio * free - held) / (1 + ratio) + 1e-6)
    return max(0, min(free, most if held else max(most, 1)))
