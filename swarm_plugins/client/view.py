"""A client's view of the swarm: which servers hold which blocks of one model version, how fast, and who is banned."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarm_plugins.client.digests import DigestCache
from swarm_plugins.client.hedging import HedgeBudget
from swarm_plugins.client.missing import ranges, serve_command
from swarm_plugins.client.observer import CallObserver, NoObserver
from swarm_plugins.client.probing import Probes
from swarm_plugins.errors import (
    MissingBlocksError,
    ProtocolError,
    SwarmError,
    TransportError,
    one_line,
)
from swarm_plugins.routing import BanList, Demand, ServerEntry, SpanChoice, missing_blocks, plan
from swarm_plugins.routing.chain import Alternative, expected
from swarm_plugins.routing.coverage import spread_sample
from swarm_plugins.transport.channel import Directory
from swarm_plugins.transport.messages import ServerInfo
from swarm_plugins.transport.records import check_server_info
from swarm_plugins.versions import ModelVersion

if TYPE_CHECKING:
    from swarm_plugins.client.config import SwarmConfig
    from swarm_plugins.client.peers import Peers

log = logging.getLogger(__name__)

_MAX_PROBES = 64
"""Servers asked in one refresh; of more, a sample that covers every block, where banned ones crowd out no others."""
_LOOK_UP_S = 0.5
"""Wait for the directory once an earlier answer is known."""
_HURRY_S = 2.0
"""Wait for servers once some have answered before."""
_REMEMBERED_S = 600.0
"""A server is asked for this long after its last answer, also if the directory does not name it."""
_WORTH_ASKING = ("online", "stuck")
"""States announced by servers to ask: one that hung may have got on since."""
_MAX_INFOS = 1024
"""Servers whose answers are remembered; above this, departed servers are forgotten."""


class SwarmView:
    """Finds servers of one model version and plans chains over them."""

    def __init__(
        self,
        directory: Directory,
        peers: Peers,
        config: SwarmConfig,
        *,
        version: ModelVersion,
        num_blocks: int,
        model: str | None = None,
        initial_peers: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self.peers = peers
        self.config = config
        self.version = version
        self.num_blocks = num_blocks
        self.model = model or version.name
        """Directory or id, as the user wrote it."""
        self.initial_peers = tuple(initial_peers)
        self.seed = random.getrandbits(64)
        """Decides between servers that are alike: differently for each client, always alike for one."""
        self.bans = BanList()
        self.observer: CallObserver = NoObserver()
        """Examines answers, and excludes peers."""
        self.infos: dict[str, ServerInfo] = {}
        """Each server's last answer about itself."""
        self._last_failure: BaseException | None = None
        self._last_failed: str | None = None
        """The peer that was banned last, and why."""
        self._announced: dict[str, ServerInfo] = {}
        self.entries: dict[str, ServerEntry] = {}
        """Servers that answered the last refresh, and have not failed since."""
        self._answered_at: dict[str, float] = {}
        self._refreshed_at = float("-inf")
        self._lock = asyncio.Lock()
        self._looking_up: asyncio.Task[dict[str, ServerInfo]] | None = None
        self._probes = Probes(self._probe)
        self._refreshing: asyncio.Task[None] | None = None

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
        if chain is None and self._refreshed_at < wanted_at:
            await self.refresh(force=True)
            chain = self._plan(blocks, demand, without)
        if chain is None:
            raise MissingBlocksError(self._missing_text(blocks, without, failure))
        await self.pause_for(span.peer for span in chain)
        return chain

    async def pause_for(self, peers: Iterable[str]) -> None:
        """Waits a moment before banned servers are asked again, if others have not what they have."""
        await asyncio.sleep(max((self.bans.pause_s(peer) for peer in peers if self.bans.is_banned(peer)), default=0.0))

    def _plan(self, blocks: range, demand: Demand, without: Collection[str]) -> list[SpanChoice] | None:
        usable = self._believed(without)
        roomy = [entry for entry in usable if not self._is_small(entry.peer)]
        chain = plan(roomy, blocks, demand, seed=self.seed)
        return chain if chain is not None or len(roomy) == len(usable) else plan(usable, blocks, demand, seed=self.seed)

    def _believed(self, without: Collection[str]) -> list[ServerEntry]:
        """Returns the usable servers, with what was seen of their speed instead of what they announce."""
        loads = {peer: info.load for peer, info in self.infos.items()}
        return self.peers.paces.corrected(self.usable(without), loads)

    def alternative(
        self, blocks: range, demand: Demand, history: Demand, *, without: Collection[str]
    ) -> Alternative | None:
        """Returns the best chain of other servers with room; see `expected`."""
        believed = [entry for entry in self._believed(without) if entry.free_kv_tokens >= demand.kv_tokens]
        return expected(believed, blocks, demand, history, seed=self.seed)

    def replica(self, blocks: range, demand: Demand, *, without: Collection[str]) -> str | None:
        """Returns the best of the other servers that hold all of some blocks; None if there is none in order."""
        others = [
            entry
            for entry in self._believed(without)
            if entry.start <= blocks.start and entry.end >= blocks.stop and not self.bans.is_banned(entry.peer)
        ]
        chain = plan(others, blocks, demand, seed=self.seed)
        return chain[0].peer if chain else None

    def _is_small(self, peer: str) -> bool:
        """Returns whether a server accepts so few tokens that whole batches would be cut to crumbs for it."""
        return 0 < self._max_tokens_of(peer) < self.config.min_batch_tokens

    def _max_tokens_of(self, peer: str) -> int:
        info = self.infos.get(peer)
        return 0 if info is None else info.max_batch_tokens

    def max_batch_tokens(self, blocks: range) -> int | None:
        """Returns the largest request (rows times tokens) that every server of any plan accepts; None: no limit."""
        # The loop's thread may refresh meanwhile; it replaces the table as a whole.
        entries = [entry for entry in self.entries.values() if entry.start < blocks.stop and entry.end > blocks.start]
        roomy = [entry for entry in entries if not self._is_small(entry.peer)]
        if missing_blocks(roomy, blocks):
            roomy = entries
        limits = [self._max_tokens_of(entry.peer) for entry in roomy]
        return min((limit for limit in limits if limit > 0), default=None)

    def ban(self, peer: str, error: BaseException) -> None:
        """Excludes a peer from plans for a while, and until it has said again what it serves."""
        seconds = self.bans.ban(peer)
        self._last_failure, self._last_failed = error, peer
        self._remove(peer)
        log.info("server %s is left out for %.0f s: %s", peer, seconds, one_line(error))

    def doubt(self) -> None:
        """Asks all servers again before the next plan."""
        self._refreshed_at = float("-inf")

    def outdate(self, peer: str, error: BaseException) -> None:
        """Forgets what a peer serves, and asks all again before the next plan."""
        log.info("server %s is asked again what it serves: %s", peer, error)
        self._remove(peer)
        self.doubt()

    def _remove(self, peer: str) -> None:
        # Replaced as a whole: other threads read the table.
        self.entries = {other: entry for other, entry in self.entries.items() if other != peer}

    @property
    def is_help_coming(self) -> bool:
        """Whether servers announce that they are loading blocks that none holds now."""
        missing = missing_blocks(list(self.entries.values()), range(self.num_blocks))
        loading = [info for info in self._announced.values() if info.target or info.state == "joining"]
        return any(block in range(*(one.target or (one.start, one.end))) for block in missing for one in loading)

    @property
    def is_stale(self) -> bool:
        """Whether the view is so old that it should be refreshed before a plan."""
        return time.monotonic() - self._refreshed_at >= self.config.refresh_s

    async def refresh(self, *, force: bool) -> None:
        """Updates the view if it is old; ``force``: also if it is not, unless that is done meanwhile.

        A directory and servers that hang are not waited for once others are known: their answers count when they come.

        Raises:
            TransportError: If the directory cannot be asked and no earlier answer is known.
        """
        wanted_at = time.monotonic()
        async with self._lock:
            if self._refreshed_at > wanted_at or not (force or self.is_stale):
                return
            is_first = not self.infos
            await self._look_up()
            online = {
                peer: self.share_of(info)
                for peer, info in self._announced.items()
                if info.state in _WORTH_ASKING and self.is_of_use(info) and not self.observer.is_excluded(peer)
            }
            if len(online) > _MAX_PROBES:
                online = {peer: online[peer] for peer in self.bans.usable(online, copies=2)}
            limit_s = self.config.info_timeout_s if is_first else min(_HURRY_S, self.config.info_timeout_s)
            asked = {peer: online[peer] for peer in self._sample(online)}
            self._refreshed_at = time.monotonic()
            answered = await self._probes.ask(asked, longest_s=limit_s)
            self.entries = {peer: entry for peer, entry in self.entries.items() if peer in answered}
            self._forget_departed()

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

    async def _look_up(self) -> None:
        """Asks the directory; a late answer counts from the next refresh on, which is then due at once."""
        if self._looking_up is None:
            self._looking_up = asyncio.create_task(self._ask_directory(), name="look up servers")
        looking = self._looking_up
        await asyncio.wait({looking}, timeout=_LOOK_UP_S if self._announced else None)
        if looking.done():
            self._looking_up = None
            self._announced = looking.result()
        else:
            looking.add_done_callback(self._outdate)

    def _outdate(self, looking: asyncio.Task[dict[str, ServerInfo]]) -> None:
        if not looking.cancelled() and looking.exception() is None:
            self.doubt()

    def is_of_use(self, info: ServerInfo) -> bool:
        """Returns whether a server's announcement makes it worth asking: it serves whole blocks."""
        return info.experts is None

    def share_of(self, info: ServerInfo) -> Sequence[Hashable]:
        """Returns what a sample of servers should cover: the blocks served."""
        return range(info.start, info.end)

    def _sample(self, online: dict[str, Sequence[Hashable]]) -> list[str]:
        """Chooses servers to ask; no flood of others crowds out initial peers and those that have answered before."""
        named = self.entries.keys() | {address.rpartition("/")[2] for address in self.initial_peers}
        known = {peer: span for peer, span in online.items() if peer in named}
        again = spread_sample(known, _MAX_PROBES // 2)
        others = {peer: span for peer, span in online.items() if peer not in again}
        return [*again, *spread_sample(others, _MAX_PROBES - len(again))]

    def _forget_departed(self) -> None:
        for peer in [peer for peer in self.infos if peer not in self.entries]:
            if len(self.infos) <= _MAX_INFOS:
                return
            del self.infos[peer]
            self._answered_at.pop(peer, None)

    async def _ask_directory(self) -> dict[str, ServerInfo]:
        try:
            announced = await self.directory.servers(self.version.key, self.num_blocks)
        except TransportError as exc:
            if not self._announced:
                raise
            # One failed lookup must not end a training run: the servers themselves are asked anyway.
            log.warning("could not look up the servers of %s, using the last answer: %s", self.version, exc)
            return self._announced
        if not announced and self._announced:
            # More likely that this client has lost sight of the directory than that all servers have left.
            log.warning("the directory names no server of %s any more: asking those of the last answer", self.version)
            return self._announced
        allowed = self.config.allowed_peers
        found = {peer: info for peer, info in announced.items() if allowed is None or peer in allowed}
        # After an outage the directory may know some of the servers only: others announce themselves again later.
        earliest = time.monotonic() - _REMEMBERED_S
        known = {peer: self.infos[peer] for peer, at in self._answered_at.items() if at > earliest}
        return {**{peer: info for peer, info in known.items() if info.state == "online"}, **found}

    async def _probe(self, peer: str) -> bool:
        """Asks a server what it serves, which overrides its announcement, and measures the round trip."""
        started = time.perf_counter()
        try:
            # All wait for the slowest server, so the deadline includes connecting.
            info = await self.peers.info(peer)
            self._check(info)
        except SwarmError as exc:
            self.ban(peer, exc)
            return False
        self.infos[peer] = info
        num_blocks = info.end - info.start
        token_s = num_blocks / info.throughput if info.throughput > 0 else 0.0
        self.peers.deadlines.announce(peer, step_s=info.decode_s * num_blocks, token_s=token_s)
        self._answered_at[peer] = time.monotonic()
        if info.state != "online":
            return False
        entry = ServerEntry(
            peer=peer,
            start=info.start,
            end=info.end,
            round_trip_s=self.peers.paces.round_trip_s(peer) or time.perf_counter() - started,
            step_s=max(info.decode_s, 0.0),
            throughput=max(info.throughput, 0.0),
            free_kv_tokens=info.free_kv_tokens,
        )
        # Replaced as a whole: other threads read the table.
        self.entries = {**self.entries, peer: entry}
        return True

    def _check(self, info: ServerInfo) -> None:
        check_server_info(info)
        if info.version != self.version.key:
            raise ProtocolError(f"it announced version {self.version} but serves {info.version} ({info.model})")
        if info.num_blocks != self.num_blocks or not 0 <= info.start < info.end <= self.num_blocks:
            raise ProtocolError(
                f"it claims blocks {info.start}:{info.end} of {info.num_blocks}, the model has {self.num_blocks} blocks"
            )
        if not self.is_of_use(info):
            raise ProtocolError(f"it announced another share of blocks {info.start}:{info.end} than it serves")

    def usable(self, without: Collection[str] = frozenset()) -> Sequence[ServerEntry]:
        """Returns the servers to plan with: not banned, or the only holders of something, and not among ``without``."""
        entries = [
            entry
            for entry in self.entries.values()
            if entry.peer not in without and not self.observer.is_excluded(entry.peer)
        ]
        if not any(self.bans.is_banned(entry.peer) for entry in entries):
            return entries
        shares = {entry.peer: self.share_of(self.infos[entry.peer]) for entry in entries}
        peers = set(self.bans.usable(shares))
        return [entry for entry in entries if entry.peer in peers]

    def _missing_text(self, blocks: range, without: Collection[str], failure: SwarmError | None) -> str:
        missing = missing_blocks(self.usable(without), blocks) or list(blocks)
        wanted = range(missing[0], missing[-1] + 1)
        return self.missing_text(f"blocks {ranges(missing)}", wanted, None, without, failure)

    def missing_text(
        self,
        what: str,
        blocks: range,
        experts: range | None,
        without: Collection[str],
        failure: SwarmError | None,
    ) -> str:
        """Returns a message about what no server holds, with the command that serves it."""
        banned = sorted({*self.bans.banned(), *without})
        reasons = [f"left out after failures: {', '.join(banned)}"] if banned else []
        excluded = sorted(peer for peer in self._announced if self.observer.is_excluded(peer))
        reasons += [f"quarantined for wrong answers: {', '.join(excluded)}"] if excluded else []
        is_lost = self._last_failed is not None and self._last_failed not in self.entries
        cause = failure or (self._last_failure if banned or is_lost else None)
        reasons += [f"the last failure: {one_line(cause, max_chars=1000)}"] if cause is not None else []
        command = serve_command(
            self.model, self.version.revision, blocks, self.initial_peers, without=banned, experts=experts
        )
        return (
            f"no living server holds {what} of {self.version}"
            + (f" ({'; '.join(reasons)})" if reasons else "")
            + f"; serve them with: {command}"
        )


@dataclass(frozen=True)
class Servers:
    """Everything needed to run blocks of one model version."""

    peers: Peers
    view: SwarmView
    digests: DigestCache = field(default_factory=DigestCache)
    hedges: HedgeBudget = field(default_factory=HedgeBudget)
