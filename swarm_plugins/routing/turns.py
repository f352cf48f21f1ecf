"""Whose turn it is to move: one server at a time, by a rule that all compute alike, without waiting for a dead one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property

from swarm_plugins.borders import NO_TIES
from swarm_plugins.recent import Recent
from swarm_plugins.routing.placement import Move, Placed, best_span, next_move, rank

_MAX_REMEMBERED = 1024


class Snapshot:
    """The servers of a model version at one moment, and the move that follows from them."""

    def __init__(self, num_blocks: int, servers: Sequence[Placed], tied: Collection[int] = NO_TIES) -> None:
        self.num_blocks = num_blocks
        self.tied = tied
        self.servers = tuple(servers)

    @cached_property
    def movers(self) -> tuple[Placed, ...]:
        """The servers that are moving."""
        return tuple(one for one in self.servers if one.target is not None)

    @cached_property
    def move(self) -> Move | None:
        """The move that helps most; see `next_move`."""
        return next_move(self.num_blocks, self.servers, self.tied)

    def span_of_new(self, peer: str, length: int, rate: float) -> range:
        """Returns the span of a server that joins; see `best_span`.

        Of those that join at the same time, each considers only the ones before it in an order that all know.
        """
        before = [one for one in self.servers if one.peer != peer and (one.is_online or rank(one.peer) < rank(peer))]
        return best_span(self.num_blocks, before, length, rate, self.tied)

    def staying(self, peers: set[str]) -> Snapshot:
        """Returns the snapshot as if some servers could not move."""
        servers = [replace(one, mobility="pinned", target=None) if one.peer in peers else one for one in self.servers]
        return Snapshot(self.num_blocks, servers, self.tied)


class Turns:
    """Decides when a server moves: if the snapshot says so, and no other server is moving.

    A mover that never arrives, and a server that should move and does not, hold up the others for a while only.

    Args:
        peer: The server itself.
        patience_s: Seconds to wait for a mover; also how long it must stay to be waited for again, and how long a
            server that has lost its turn is passed over.
        turn_s: Seconds after which a server that should move loses its turn.
    """

    def __init__(self, peer: str, *, patience_s: float = 900.0, turn_s: float = 120.0) -> None:
        self.peer = peer
        self.patience_s = patience_s
        self.turn_s = turn_s
        self._moving: Recent[str, tuple[float, float]] = Recent(_MAX_REMEMBERED)
        """Since when a server has been moving, and when it was last seen to; other targets are no new moves."""
        self._due: tuple[Move, float] | None = None
        self._late: Recent[str, float] = Recent(_MAX_REMEMBERED)
        """When a server has lost its turn. It may have one again, or those that saw it and others would differ."""

    def mine(self, snapshot: Snapshot, now: float) -> Move | None:
        """Returns the move that this server should make at a monotonic time, or None."""
        stuck = self._stuck(snapshot.movers, now)
        if len(stuck) < len(snapshot.movers):
            self._due = None  # whoever is due has to wait, too
            return None
        staying = stuck | {peer for peer, since in self._late.items() if now - since <= self.patience_s}
        move = (snapshot.staying(staying) if staying else snapshot).move
        if move is None or move.peer == self.peer:
            self._due = None
            return move
        if self._due is None or self._due[0] != move:
            self._due = (move, now)
        elif now - self._due[1] > self.turn_s:
            self._late[move.peer] = now
        return None

    def _stuck(self, movers: Sequence[Placed], now: float) -> set[str]:
        stuck = set()
        for one in movers:
            since, seen = self._moving.get(one.peer, (now, now))
            # Who stays for a moment only, or names another target, must not begin anew.
            since = since if now - seen <= self.patience_s else now
            self._moving[one.peer] = since, now
            if now - since > self.patience_s:
                stuck.add(one.peer)
        return stuck
