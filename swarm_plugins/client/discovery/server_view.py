"""A client's view of the servers of one model version: kept fresh by asking them, without those that fail."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from swarm_plugins.book import judging
from swarm_plugins.book.record import Failed, Said
from swarm_plugins.borders import NO_TIES
from swarm_plugins.client.discovery.lookup import Lookup
from swarm_plugins.client.discovery.missing import serve_command
from swarm_plugins.client.discovery.probing import Probes
from swarm_plugins.client.packing import Codecs
from swarm_plugins.errors import ProtocolError, SwarmError, TransportError, one_line
from swarm_plugins.recent import Recent
from swarm_plugins.routing import ServerEntry
from swarm_plugins.routing.coverage import spread_sample
from swarm_plugins.transport.channel import Directory
from swarm_plugins.transport.records import check_server_info, possible_round_trips
from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.versions import ModelVersion

if TYPE_CHECKING:
    from swarm_plugins.client.config import SwarmConfig
    from swarm_plugins.client.peers import Peers

log = logging.getLogger(__name__)

_MAX_CAUSE_CHARS = 1000
_MAX_PROBES = 64
"""Servers asked in one refresh; of more, a sample that covers every block, where banned ones crowd out no others."""
_HURRY_S = 2.0
"""Wait for servers once some have answered before."""
_WORTH_ASKING = ("online", "stuck")
"""States announced by servers to ask: one that hung may have got on since."""


class ServerView(ABC):
    """Finds servers of one model version that have a part of what is wanted; what that is, subclasses say."""

    def __init__(
        self,
        directory: Directory,
        peers: Peers,
        config: SwarmConfig,
        *,
        version: ModelVersion,
        num_blocks: int,
        tied: Collection[int] = NO_TIES,
        model: str | None = None,
        initial_peers: Sequence[str] = (),
        excludes: Callable[[str], bool] = lambda peer: False,
    ) -> None:
        self.peers = peers
        self.config = config
        self.version = version
        self.num_blocks = num_blocks
        self.tied = tied
        """Blocks that run on the server of the block before; see `swarm_plugins.borders`."""
        self.model = model or version.name
        """Directory or id, as the user wrote it."""
        self.initial_peers = tuple(initial_peers)
        self.seed = random.getrandbits(64)
        """Decides between servers that are alike: differently for each client, always alike for one."""
        self.excludes = excludes
        """Says of a peer that it must not be asked at all."""
        self.entries: dict[str, ServerEntry] = {}
        """Servers that answered the last refresh, and have not failed since. Replaced as a whole: other threads read
        it."""
        self.codecs = Codecs(config.codec, peers.book)
        self.lookup = Lookup(
            directory,
            version,
            num_blocks,
            allowed=config.allowed_peers,
            remembered=self._remembered,
            on_late=self.doubt,
        )
        self.refreshed_at = float("-inf")
        self._misfits: Recent[str, float] = Recent()
        """When a server was found to serve something else than it is announced for."""
        self._has_answers = False
        self._last_failure: BaseException | None = None
        self._last_failed: str | None = None
        """The peer that was banned last, and why."""
        self._lock = asyncio.Lock()
        self._probes = Probes(self._probe)
        self._refreshing: asyncio.Task[None] | None = None

    @abstractmethod
    def is_of_use(self, info: ServerInfo) -> bool:
        """Returns whether a server's announcement makes it worth asking."""

    @abstractmethod
    def share_of(self, info: ServerInfo) -> Sequence[Hashable]:
        """Returns the parts of what is wanted that a server has: a sample of servers should cover all."""

    # -- refreshing ---------------------------------------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """Whether the view is so old that it should be refreshed before a plan."""
        return time.monotonic() - self.refreshed_at >= self.config.refresh_s

    def doubt(self) -> None:
        """Asks all servers again before the next plan."""
        self.refreshed_at = float("-inf")

    async def refresh(self, *, force: bool) -> None:
        """Updates the view if it is old; ``force``: also if it is not, unless that is done meanwhile.

        A directory and servers that hang are not waited for once others are known: their answers count when they come.

        Raises:
            TransportError: If the directory cannot be asked and no earlier answer is known.
        """
        wanted_at = time.monotonic()
        async with self._lock:
            if self.refreshed_at > wanted_at or not (force or self.is_stale):
                return
            longest_s = min(_HURRY_S, self.config.info_timeout_s) if self._has_answers else self.config.info_timeout_s
            await self.lookup.ask()
            asked = self._sample()
            self.refreshed_at = time.monotonic()
            answered = await self._probes.ask(asked, longest_s=longest_s)
            self.entries = {peer: entry for peer, entry in self.entries.items() if peer in answered}

    def refresh_in_background(self) -> asyncio.Task[None]:
        """Updates the view, unless that is under way."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh_quietly(), name="look up servers")
        return self._refreshing

    async def _refresh_quietly(self) -> None:
        try:
            await self.refresh(force=True)
        except TransportError as exc:
            log.warning("could not look up the servers of %s, using the last answer: %s", self.version, exc)

    async def close(self) -> None:
        """Ends a refresh that is under way in the background. Idempotent."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait({self._refreshing})

    def _sample(self) -> dict[str, Sequence[Hashable]]:
        """Chooses servers to ask; no flood of others crowds out initial peers and those that have answered before."""
        online = {
            peer: self.share_of(info)
            for peer, info in self.lookup.announced.items()
            if info.state in _WORTH_ASKING and self.is_of_use(info) and not self.excludes(peer)
        }
        if len(online) > _MAX_PROBES:
            now, again_s = self.peers.book.now, self.peers.book.rules.fade_s
            misfits = {peer for peer, found_at in self._misfits.items() if now - found_at < again_s}
            fitting = {peer: share for peer, share in online.items() if peer not in misfits}
            online = {peer: online[peer] for peer in judging.usable(self.peers.book, fitting, copies=2)}
        named = self.entries.keys() | {address.rpartition("/")[2] for address in self.initial_peers}
        again = spread_sample({peer: share for peer, share in online.items() if peer in named}, _MAX_PROBES // 2)
        others = {peer: share for peer, share in online.items() if peer not in again}
        return {peer: online[peer] for peer in [*again, *spread_sample(others, _MAX_PROBES - len(again))]}

    async def _probe(self, peer: str) -> bool:
        """Asks a server what it serves, which overrides its announcement, and measures the round trip."""
        started = time.perf_counter()
        try:
            said = await self.peers.info(peer)
            check_server_info(said)
        except SwarmError as exc:
            self.ban(peer, exc)
            return False
        try:
            info = self._checked(said)
        except ProtocolError as exc:
            # Perhaps it serves another model now: no reason for that model's users to leave it out.
            self._misfits[peer] = self.peers.book.now
            self._last_failure, self._last_failed = exc, peer
            self._remove(peer)
            log.info("server %s is not used for %s: %s", peer, self.version, one_line(exc))
            return False
        self._misfits.pop(peer, None)
        self._has_answers = True
        round_trips = possible_round_trips(info)
        # Without what no client reads of it, and which may be long.
        self.peers.offers(peer, said.adapter_digests)
        known = msgspec.structs.replace(said, round_trips=tuple(round_trips.items()), adapters=(), adapter_digests=())
        self.peers.book.observe(peer, Said(known))
        if info.state != "online":
            return False
        entry = ServerEntry(
            peer=peer,
            start=info.start,
            end=info.end,
            round_trip_s=judging.round_trip_s(self.peers.book[peer]) or time.perf_counter() - started,
            step_s=info.decode_s,
            throughput=info.throughput,
            free_kv_tokens=info.free_kv_tokens,
            kv_row_tokens=info.kv_row_tokens,
            pushes=info.pushes,
            round_trips=round_trips,
        )
        self.entries = {**self.entries, peer: entry}
        return True

    @property
    def infos(self) -> dict[str, ServerInfo]:
        """What servers of this version have said of themselves; other threads may read it."""
        records = self.peers.book.records()
        infos = {peer: self._seen(record.info) for peer, record in records.items()}
        return {peer: info for peer, info in infos.items() if info is not None and self.is_of_use(info)}

    def said(self, peer: str) -> ServerInfo | None:
        """Returns what a server has said of itself; None: nothing yet, or that it serves another version."""
        return self._seen(self.peers.book[peer].info)

    def _seen(self, said: ServerInfo | None) -> ServerInfo | None:
        """Returns what a server is to users of this version."""
        return None if said is None else said.of(self.version.key)

    def _remembered(self) -> dict[str, ServerInfo]:
        """Returns the servers that were online when they answered, not long ago."""
        book = self.peers.book
        earliest = book.now - book.rules.remembered_s
        return {
            peer: info for peer, info in self.infos.items() if book[peer].said_at > earliest and info.state == "online"
        }

    def _checked(self, said: ServerInfo) -> ServerInfo:
        info = said.of(self.version.key)
        if info is None:
            raise ProtocolError(f"it announced version {self.version} but serves {said.version} ({said.model})")
        if info.num_blocks != self.num_blocks:
            raise ProtocolError(
                f"it claims blocks {info.start}:{info.end} of {info.num_blocks}, the model has {self.num_blocks} blocks"
            )
        if not self.is_of_use(info):
            raise ProtocolError(f"it announced another share of blocks {info.start}:{info.end} than it serves")
        return info

    # -- failures -----------------------------------------------------------------------------------------------------

    def ban(self, peer: str, error: BaseException) -> None:
        """Excludes a peer from plans for a while, and until it has said again what it serves."""
        book = self.peers.book
        book.observe(peer, Failed(one_line(error)))
        self.peers.counts.bans += 1
        self._last_failure, self._last_failed = error, peer
        self._remove(peer)
        seconds = judging.ban_s(book[peer])
        log.info("server %s is left out for %.0f s: %s", peer, seconds, one_line(error))

    def _remove(self, peer: str) -> None:
        """Plans without a server until it answers again."""
        self.entries = {other: entry for other, entry in self.entries.items() if other != peer}

    def banned(self) -> list[str]:
        """Returns the announced servers that are banned now."""
        return [peer for peer in judging.bans(self.peers.book) if peer in self.lookup.announced]

    def outdate(self, peer: str, error: BaseException) -> None:
        """Forgets what a peer serves, and asks all again before the next plan."""
        log.info("server %s is asked again what it serves: %s", peer, error)
        self._remove(peer)
        self.doubt()

    async def pause_for(self, peers: Iterable[str]) -> None:
        """Waits a moment before banned servers are asked again, if others have not what they have."""
        await asyncio.sleep(max((judging.pause_s(self.peers.book, peer) for peer in peers), default=0.0))

    # -- what to plan with --------------------------------------------------------------------------------------------

    def usable(self, without: Collection[str] = frozenset()) -> Sequence[ServerEntry]:
        """Returns the servers to plan with: not banned, or the only holders of something, and not among ``without``."""
        entries = [
            entry for entry in self.entries.values() if entry.peer not in without and not self.excludes(entry.peer)
        ]
        book = self.peers.book
        if not any(judging.is_banned(book, entry.peer) for entry in entries):
            return entries
        peers = set(judging.usable(book, {entry.peer: self._share(entry.peer) for entry in entries}))
        return [entry for entry in entries if entry.peer in peers]

    def has_other(self, peer: str, without: Collection[str]) -> bool:
        """Returns whether a server that is in order, and not among ``without``, has a part of what a peer has."""
        share = set(self._share(peer))
        return any(
            not share.isdisjoint(self._share(entry.peer))
            for entry in self.usable({peer, *without})
            if not judging.is_banned(self.peers.book, entry.peer)
        )

    def _share(self, peer: str) -> Sequence[Hashable]:
        info = self.said(peer)
        return () if info is None else self.share_of(info)

    def max_batch_tokens(self, peer: str) -> int:
        """Returns the largest request (rows times tokens) that a server accepts; 0 if it names no limit."""
        info = self.said(peer)
        return 0 if info is None else info.max_batch_tokens

    def is_small(self, peer: str) -> bool:
        """Returns whether a server accepts so few tokens that whole batches would be cut to crumbs for it."""
        return 0 < self.max_batch_tokens(peer) < self.config.min_batch_tokens

    @property
    def is_help_coming(self) -> bool:
        """Whether servers announce that they are loading what none has now."""
        held = {part for peer in self.entries for part in self._share(peer)}
        for info in self.lookup.announced.values():
            if self.is_of_use(info) and (info.target is not None or info.state == "joining"):
                start, end = info.target or (info.start, info.end)
                if not held.issuperset(self.share_of(msgspec.structs.replace(info, start=start, end=end))):
                    return True
        return False

    def missing_text(
        self,
        what: str,
        blocks: range,
        experts: range | None,
        without: Collection[str],
        failure: SwarmError | None,
    ) -> str:
        """Returns a message about what no server holds, with the command that serves it."""
        left_out = sorted({*self.banned(), *without})
        quarantined = sorted(peer for peer in self.lookup.announced if self.excludes(peer))
        is_lost = self._last_failed is not None and self._last_failed not in self.entries
        cause = failure or (self._last_failure if left_out or is_lost else None)
        reasons = [f"left out after failures: {', '.join(left_out)}"] if left_out else []
        reasons += [f"quarantined for wrong answers: {', '.join(quarantined)}"] if quarantined else []
        reasons += [f"the last failure: {one_line(cause, max_chars=_MAX_CAUSE_CHARS)}"] if cause is not None else []
        command = serve_command(
            self.model,
            self.version.revision,
            blocks,
            self.initial_peers,
            without=left_out,
            experts=experts,
            discovery=self.config.discovery,
            secret_file=self.config.secret_file,
        )
        why = f" ({'; '.join(reasons)})" if reasons else ""
        if self.config.discovery == "static":
            why += "; add the new server's address to initial_peers, as discovery is static"
        return f"no living server holds {what} of {self.version}{why}; serve them with: {command}"
