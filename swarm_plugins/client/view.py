"""A client's view of the swarm: which servers hold which blocks of one model version, how fast, and who is banned."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarm_plugins.client.digests import DigestCache
from swarm_plugins.client.observer import CallObserver, NoObserver
from swarm_plugins.errors import (
    MissingBlocksError,
    ProtocolError,
    RequestTimeoutError,
    SwarmError,
    TransportError,
    one_line,
)
from swarm_plugins.routing import BanList, Demand, ServerEntry, SpanChoice, missing_blocks, plan
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
"""Servers asked for their state in one refresh; in a larger swarm, a sample that covers every block."""
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
        """Addresses used to join the swarm; for messages."""
        self.bans = BanList()
        self.observer: CallObserver = NoObserver()
        """Examines answers, and excludes peers."""
        self.infos: dict[str, ServerInfo] = {}
        """Each server's last answer about itself."""
        self._last_failure: BaseException | None = None
        """Of the peer that was banned last."""
        self._announced: dict[str, ServerInfo] = {}
        self.entries: dict[str, ServerEntry] = {}
        """Servers that answered the last refresh."""
        self._refreshed_at = float("-inf")
        self._lock = asyncio.Lock()

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
        await self.refresh(force=False)
        chain = self._plan(blocks, demand, without)
        if chain is None:
            await self.refresh(force=True)
            chain = self._plan(blocks, demand, without)
        if chain is None:
            raise MissingBlocksError(self._missing_text(blocks, without, failure))
        return chain

    def _plan(self, blocks: range, demand: Demand, without: Collection[str]) -> list[SpanChoice] | None:
        usable = self.usable(without)
        roomy = [entry for entry in usable if not self._is_small(entry.peer)]
        chain = plan(roomy, blocks, demand)
        return chain if chain is not None or len(roomy) == len(usable) else plan(usable, blocks, demand)

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
        """Excludes a peer from plans for a while."""
        seconds = self.bans.ban(peer)
        self._last_failure = error
        log.info("server %s is left out for %.0f s: %s", peer, seconds, error)

    def outdate(self, peer: str, error: BaseException) -> None:
        """Forgets what a peer serves, and asks all again before the next plan."""
        log.info("server %s is asked again what it serves: %s", peer, error)
        # Replaced as a whole: other threads read the table.
        self.entries = {other: entry for other, entry in self.entries.items() if other != peer}
        self._refreshed_at = float("-inf")

    @property
    def is_stale(self) -> bool:
        """Whether the view is so old that it should be refreshed before a plan."""
        return time.monotonic() - self._refreshed_at >= self.config.refresh_s

    async def refresh(self, *, force: bool) -> None:
        """Updates the view if it is old.

        Raises:
            TransportError: If the directory cannot be asked and no earlier answer is known.
        """
        async with self._lock:
            if not force and not self.is_stale:
                return
            self._announced = await self._ask_directory()
            # Banned servers must not crowd others out of the sample.
            online = {
                peer: self.share_of(info)
                for peer, info in self._announced.items()
                if info.state == "online" and self.is_of_use(info) and not self._is_left_out(peer)
            }
            probed = await asyncio.gather(*(self._probe(peer) for peer in self._sample(online)))
            self.entries = {entry.peer: entry for entry in probed if entry is not None}
            self._forget_departed()
            self._refreshed_at = time.monotonic()

    def is_of_use(self, info: ServerInfo) -> bool:
        """Returns whether a server's announcement makes it worth asking: it serves whole blocks."""
        return info.experts is None

    def share_of(self, info: ServerInfo) -> Sequence[Hashable]:
        """Returns what a sample of servers should cover: the blocks served."""
        return range(info.start, info.end)

    def _sample(self, online: dict[str, Sequence[Hashable]]) -> list[str]:
        """Chooses servers to ask; a flood of announcements cannot crowd out those that have answered before."""
        known = {peer: span for peer, span in online.items() if peer in self.entries}
        again = spread_sample(known, _MAX_PROBES // 2)
        others = {peer: span for peer, span in online.items() if peer not in again}
        return [*again, *spread_sample(others, _MAX_PROBES - len(again))]

    def _forget_departed(self) -> None:
        for peer in [peer for peer in self.infos if peer not in self._announced]:
            if len(self.infos) <= _MAX_INFOS:
                return
            del self.infos[peer]

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
        return {peer: info for peer, info in announced.items() if allowed is None or peer in allowed}

    async def _probe(self, peer: str) -> ServerEntry | None:
        """Asks a server what it serves, which overrides its announcement, and measures the round trip."""
        started = time.perf_counter()
        try:
            info = await self._ask(peer)
            self._check(info)
        except SwarmError as exc:
            self.ban(peer, exc)
            return None
        self.infos[peer] = info
        if info.state != "online":
            return None
        return ServerEntry(
            peer=peer,
            start=info.start,
            end=info.end,
            round_trip_s=time.perf_counter() - started,
            step_s=max(info.decode_s, 0.0),
            throughput=max(info.throughput, 0.0),
            free_kv_tokens=info.free_kv_tokens,
        )

    async def _ask(self, peer: str) -> ServerInfo:
        # All wait for the slowest server, so the deadline includes connecting.
        limit_s = self.config.info_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self.peers.info(peer)
        except TimeoutError as exc:
            raise RequestTimeoutError(f"it did not report what it serves within {limit_s:g} s") from exc

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
        """Returns the servers that are neither banned nor among ``without``."""
        entries = self.entries.values()
        return [entry for entry in entries if entry.peer not in without and not self._is_left_out(entry.peer)]

    def _is_left_out(self, peer: str) -> bool:
        return self.bans.is_banned(peer) or self.observer.is_excluded(peer)

    def _missing_text(self, blocks: range, without: Collection[str], failure: SwarmError | None) -> str:
        missing = missing_blocks(self.usable(without), blocks)
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
        cause = failure or (self._last_failure if banned else None)
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


def ranges(blocks: Sequence[int]) -> str:
    """Writes sorted indices as ranges: ``0:4, 7:8``."""
    parts: list[list[int]] = []
    for block in blocks:
        if parts and parts[-1][1] == block:
            parts[-1][1] = block + 1
        else:
            parts.append([block, block + 1])
    return ", ".join(f"{start}:{end}" for start, end in parts)


def serve_command(
    model: str,
    revision: str,
    blocks: range,
    initial_peers: Sequence[str],
    *,
    without: Collection[str] = (),
    experts: range | None = None,
) -> str:
    """Returns a command to paste that serves missing blocks, or ``experts`` of them; the model's name is not trusted.

    It joins by one of ``initial_peers``, if possible not one of ``without``. A ``revision`` that is the fingerprint
    (``local-...``) of a directory is left out.
    """
    living = [address for address in initial_peers if address.rpartition("/")[2] not in without]
    address = next(iter([*living, *initial_peers]), "ADDRESS")
    # On the Hub another commit would be another version, which does not fill the gap.
    commit = [] if revision.startswith("local-") else ["--revision", revision]
    share = ["--blocks", f"{blocks.start}:{blocks.stop}"]
    if experts is not None:
        share += ["--experts", f"{experts.start}:{experts.stop}"]
    return shlex.join(["swarm", "serve", model, *commit, *share, "--initial-peers", address])
