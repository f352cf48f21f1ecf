"""What servers have said of themselves: bookkeeping, without waits."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from swarm_plugins.transport.records import possible_round_trips

if TYPE_CHECKING:
    from swarm_plugins.routing import ServerEntry
    from swarm_plugins.transport.server_info import ServerInfo

_REMEMBERED_S = 600.0
"""A server is asked for this long after its last answer, also if the directory does not name it."""
_MAX_INFOS = 1024
"""Servers whose answers are remembered; above this, departed servers are forgotten."""


class KnownServers:
    """Remembers answers of servers, and which of them can be planned with now."""

    def __init__(self) -> None:
        self.infos: dict[str, ServerInfo] = {}
        """Each server's last answer about itself."""
        self.entries: dict[str, ServerEntry] = {}
        """Servers that answered the last refresh, and have not failed since. Replaced as a whole: other threads read
        it."""
        self.num_impossible = 0
        """Announced round trips that cannot be, and were ignored."""
        self._answered_at: dict[str, float] = {}

    def answered(self, peer: str, info: ServerInfo) -> None:
        """Notes what a server says of itself, without round trips that cannot be."""
        round_trips = possible_round_trips(info)
        self.num_impossible += len(info.round_trips) - len(round_trips)
        self.infos[peer] = msgspec.structs.replace(info, round_trips=tuple(round_trips.items()))
        self._answered_at[peer] = time.monotonic()

    def add(self, entry: ServerEntry) -> None:
        """Plans with a server from now on."""
        self.entries = {**self.entries, entry.peer: entry}

    def remove(self, peer: str) -> None:
        """Plans without a server until it answers again."""
        self.entries = {other: entry for other, entry in self.entries.items() if other != peer}

    def keep(self, peers: Collection[str]) -> None:
        """Plans with these servers only; if very many are remembered, forgets others."""
        self.entries = {peer: entry for peer, entry in self.entries.items() if peer in peers}
        for peer in [peer for peer in self.infos if peer not in self.entries]:
            if len(self.infos) <= _MAX_INFOS:
                return
            del self.infos[peer]
            self._answered_at.pop(peer, None)

    def recent(self) -> dict[str, ServerInfo]:
        """Returns the servers that were online when they answered, not long ago."""
        earliest = time.monotonic() - _REMEMBERED_S
        known = {peer: self.infos[peer] for peer, at in self._answered_at.items() if at > earliest}
        return {peer: info for peer, info in known.items() if info.state == "online"}

    def max_batch_tokens(self, peer: str) -> int:
        """Returns the largest request (rows times tokens) that a server accepts; 0 if it names no limit."""
        info = self.infos.get(peer)
        return 0 if info is None else info.max_batch_tokens
