"""A client's view of the servers of a model's blocks, and chains of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, Protocol

from swarm_plugins.book import judging
from swarm_plugins.client.discovery.missing import ranges
from swarm_plugins.client.discovery.server_view import ServerView
from swarm_plugins.errors import MissingBlocksError, SwarmError
from swarm_plugins.routing import Demand, ServerEntry, SpanChoice, missing_blocks, plan
from swarm_plugins.routing.chain import Alternative, expected, way_s
from swarm_plugins.routing.pipeline import Schedule, best_schedule
from swarm_plugins.transport.server_info import ServerInfo


class Fallback(Protocol):
    """Serves blocks that no server holds."""

    async def stand_in(self, blocks: range) -> list[SpanChoice]:
        """Returns a chain of this process's own that runs some blocks."""

    async def close(self) -> None:
        """Ends it. Idempotent."""


class SwarmView(ServerView):
    """Finds servers of blocks, and plans chains over them.

    Args:
        args: As for `ServerView`.
        fallback: Serves blocks that no server holds. None: they are missing.
        options: As for `ServerView`.
    """

    def __init__(self, *args: Any, fallback: Fallback | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fallback = fallback

    def is_of_use(self, info: ServerInfo) -> bool:
        """Returns whether a server announces whole blocks."""
        return info.experts is None

    def share_of(self, info: ServerInfo) -> Sequence[Hashable]:
        """Returns the blocks that a server has."""
        return range(info.start, info.end)

    async def chain(
        self,
        blocks: range,
        demand: Demand,
        *,
        without: Collection[str] = frozenset(),
        failure: SwarmError | None = None,
    ) -> list[SpanChoice]:
        """Returns the best chain for some blocks ``without`` some peers; the last ``failure`` goes into the message.

        Raises:
            MissingBlocksError: If some block has no living server.
        """
        wanted_at = time.monotonic()
        await self.refresh(force=False)
        chain = self._plan(blocks, demand, without)
        if chain is None and self.refreshed_at < wanted_at:
            await self.refresh(force=True)
            chain = self._plan(blocks, demand, without)
        if chain is None:
            missing = missing_blocks(self.usable(without), blocks, self.tied) or list(blocks)
            wanted = range(missing[0], missing[-1] + 1)
            raise MissingBlocksError(self.missing_text(f"blocks {ranges(missing)}", wanted, None, without, failure))
        await self.pause_for(span.peer for span in chain)
        return chain

    def _plan(self, blocks: range, demand: Demand, without: Collection[str]) -> list[SpanChoice] | None:
        usable, closed = self.believed(without), self._closed()
        roomy = [entry for entry in usable if not self.is_small(entry.peer)]
        chain = plan(roomy, blocks, demand, seed=self.seed, closed=closed, tied=self.tied)
        if chain is None and len(roomy) < len(usable):
            chain = plan(usable, blocks, demand, seed=self.seed, closed=closed, tied=self.tied)
        return chain

    def schedule(self, blocks: range, options: Iterable[Sequence[int]], *, without: Collection[str]) -> Schedule | None:
        """Returns chains for the chunks of a batch; see `best_schedule`."""
        believed = self.believed(without)
        roomy = [entry for entry in believed if not self.is_small(entry.peer)]
        servers = believed if missing_blocks(roomy, blocks, self.tied) else roomy
        return best_schedule(servers, blocks, options, seed=self.seed, closed=self._closed(), tied=self.tied)

    def _closed(self) -> Collection[tuple[str, str]] | None:
        """Returns which servers hand nothing on to which others; None: no server is to."""
        return None if self.config.push == "off" else judging.closed_ways(self.peers.book, self.entries)

    def believed(self, without: Collection[str] = frozenset()) -> list[ServerEntry]:
        """Returns the usable servers, with what was seen of their speed instead of what they announce."""
        return judging.believed(self.peers.book, self.usable(without))

    def saved_s(self, sender: str, receiver: str) -> float:
        """Returns how much sooner an output is believed to be at the next server directly than by this client."""
        one, two = (self.entries.get(peer) for peer in (sender, receiver))
        return 0.0 if one is None or two is None else (one.round_trip_s + two.round_trip_s) / 2 - way_s(one, two)

    def alternative(
        self, blocks: range, demand: Demand, history: Demand, *, without: Collection[str]
    ) -> Alternative | None:
        """Returns the best chain of other servers with room; see `expected`."""
        believed = [entry for entry in self.believed(without) if entry.has_room(demand)]
        return expected(believed, blocks, demand, history, seed=self.seed, closed=self._closed(), tied=self.tied)

    def replica(self, blocks: range, demand: Demand, *, without: Collection[str]) -> str | None:
        """Returns the best of the other servers that hold all of some blocks; None if there is none in order."""
        others = [
            entry
            for entry in self.believed(without)
            if entry.start <= blocks.start
            and entry.end >= blocks.stop
            and not judging.is_banned(self.peers.book, entry.peer)
        ]
        chain = plan(others, blocks, demand, seed=self.seed)
        return chain[0].peer if chain else None

    def most_tokens(self, blocks: range) -> int | None:
        """Returns the largest request (rows times tokens) that every server of any plan accepts; None: no limit."""
        entries = [entry for entry in self.entries.values() if entry.start < blocks.stop and entry.end > blocks.start]
        roomy = [entry for entry in entries if not self.is_small(entry.peer)]
        if missing_blocks(roomy, blocks, self.tied):
            roomy = entries
        limits = [self.max_batch_tokens(entry.peer) for entry in roomy]
        return min((limit for limit in limits if limit > 0), default=None)
