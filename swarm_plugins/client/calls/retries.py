"""Retries of one call: how often it may fail, and what changes between attempts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from swarm_plugins.book import judging
from swarm_plugins.client.answers import OverloadedError, SpanMovedError, StreamLostError
from swarm_plugins.errors import (
    CapacityError,
    MissingBlocksError,
    MissingExpertsError,
    RefusedError,
    RequestTimeoutError,
    SessionLostError,
    SwarmError,
    TransportError,
)
from swarm_plugins.routing import Demand, SpanChoice, missing_blocks

if TYPE_CHECKING:
    from swarm_plugins.client.discovery.server_view import ServerView
    from swarm_plugins.client.discovery.view import SwarmView

log = logging.getLogger(__name__)

Plan = TypeVar("Plan")

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 1.0
_PATIENCE_S = 4.5
"""With the deadline of one request and the probes after it, missing blocks are reported within 8 s."""
_BUSY_PAUSE_S = 1.0
"""Before servers whose queue was full are asked again."""
_MOST_EXCUSED = 64
"""In one call, the first failures of at most so many servers do not count. A client knows no more servers."""
_HELP_S = 60.0
"""Patience while a server announces that it is loading the missing blocks."""


class Retries:
    """Counts the failures of one call, bans failed servers, and replans.

    Args:
        view: Plans and bans.
        may_pause: Whether to wait for servers to come back when none is left.
    """

    def __init__(self, view: ServerView, *, may_pause: bool = True) -> None:
        self.view = view
        self.may_pause = may_pause
        self.limit = view.config.max_retries
        """Failures after which the last error is raised."""
        self.failures = 0
        """Failures that count; see `note`."""
        self.last: SwarmError | None = None
        self.full: set[str] = set()
        """Servers without room for this call; not banned, as the next call may be smaller."""
        self.busy: set[str] = set()
        """Servers whose queue was full: asked again only if no other can do their part."""
        self.refusals: dict[str, RefusedError] = {}
        """Servers that refused the request itself."""
        self._failed: dict[str, int] = {}
        """The failures noted before a server's last one."""
        self._num_noted = 0
        self._progress_at = time.monotonic()
        self._reclaimed: set[str] = set()
        """Servers that have closed an idle session to make room."""
        self._moved: set[str] = set()
        """Servers that serve other blocks than they were asked for."""

    @property
    def moment(self) -> int:
        """Tells failures that were noted before from those noted after."""
        return self._num_noted

    def has_failed(self, peer: str, since: int) -> bool:
        """Returns whether a failure of a peer was noted after a ``moment``."""
        return self._failed.get(peer, -1) >= since

    def note(self, peer: str, error: SwarmError, since: int | None = None) -> None:
        """Excludes the peer from now on; raises the error if no other server can help, or after too many failures.

        Of several requests that were under way there together, only the first to fail counts: ``since`` is the
        ``moment`` at which this one was made.

        Identities cost nothing: any number of servers that fail, or refuse the request itself, must not end a call that
        another one would carry out. So the first failure of a server does not count while there is one that has not
        failed, and a refusal is believed only if none is left. Nor does a server's first lost stream: all streams end
        at once if this client's own node does.
        """
        may_do_better = isinstance(error, TransportError | CapacityError)
        if may_do_better and since is not None and self.has_failed(peer, since):
            return
        counts = self.view.peers.counts
        counts.failed(error)
        self.last = error
        is_busy = isinstance(error, OverloadedError) and self.limit > 0 and not self._is_late
        is_excused = not is_busy and self._is_excused(peer, error)
        self.failures += not (is_busy or is_excused)
        self._failed[peer] = self._num_noted
        self._num_noted += 1
        if not may_do_better or self.failures > self.limit:
            raise error
        counts.retries += 1
        remark = f"{self.failures} of {self.limit} allowed failures"
        if is_busy:
            remark = "it may be asked again"
        elif is_excused:
            remark = "its first failure does not count"
        log.warning("server %s failed (%s): %s", peer, remark, error)
        self.leave_out(peer, error)

    def leave_out(self, peer: str, error: SwarmError) -> None:
        """Excludes a server for as long as its error suggests."""
        if isinstance(error, RefusedError):
            self.refusals[peer] = error
        elif isinstance(error, CapacityError):
            self.full.add(peer)
        elif isinstance(error, OverloadedError):
            # Not at fault: its queue may be full of this client's own requests.
            self.busy.add(peer)
        elif isinstance(error, SessionLostError) and peer not in self._reclaimed:
            # Not at fault: replayed there, as on any other server.
            self._reclaimed.add(peer)
        elif isinstance(error, SpanMovedError) and peer not in self._moved:
            # Not at fault, and perhaps the only holder of its new blocks; a second time it is.
            self._moved.add(peer)
            self.view.outdate(peer, error)
        else:
            self.view.ban(peer, error)
            if isinstance(error, RequestTimeoutError):
                # What has stopped one server may have stopped others: ask them before they are tried in turn.
                self.view.doubt()

    @property
    def _is_late(self) -> bool:
        """Whether the last progress is longer ago than a request may take."""
        return time.monotonic() - self._progress_at > self.view.config.request_timeout_s

    def _is_excused(self, peer: str, error: SwarmError) -> bool:
        return (
            self.limit > 0
            and peer not in self._failed
            and len(self._failed) < _MOST_EXCUSED
            and not self._is_late
            and (isinstance(error, StreamLostError) or self.view.has_other(peer, self._failed))
        )

    def progressed(self) -> None:
        """Notes that a part of the call is done: the time to wait for lost servers starts anew."""
        self._progress_at = time.monotonic()

    def succeeded(self) -> None:
        """Bans the servers that refused a request others have now carried out."""
        for peer, error in self.refusals.items():
            self.view.ban(peer, error)
        self.refusals = {}

    @property
    def excluded(self) -> set[str]:
        """Peers that this call does not ask again, in addition to those that are banned."""
        return {*self.full, *self.refusals}

    @property
    def _leaves_only_holders(self) -> bool:
        """Whether servers that failed are left out also where they alone have some blocks.

        A server that says what it serves and then hangs gets more time at each attempt: attempts after the second begin
        within ``request_timeout_s``, so that all of them together have an end.
        """
        return (self.failures > 1 and self._is_late) or self.failures >= self.limit

    def _banned(self) -> set[str]:
        """Returns servers that are banned, with those that are not announced and failed in this call."""
        book = self.view.peers.book
        return {*self.view.banned(), *(peer for peer in self._failed if judging.is_banned(book, peer))}

    async def plan(self, make: Callable[[set[str]], Awaitable[Plan]]) -> Plan:
        """Makes a plan without some servers; after a failure, waits briefly for servers to come back.

        Waits until `_PATIENCE_S` after the last progress, what failed included: a call that only hangs has an end.

        Raises:
            MissingBlocksError: If no living server holds what is needed, also after the retries.
            CapacityError: If the only servers that hold it have no room.
            RefusedError: If the only servers that hold it refuse the request.
        """
        while True:
            # At last also without those that failed, though no other server has their blocks: these are missing.
            failed = self._banned() if self._leaves_only_holders else ()
            try:
                return await make({*self.excluded, *self.busy, *failed})
            except MissingBlocksError as exc:
                if self.busy and self.may_pause:
                    self.busy.clear()
                    await asyncio.sleep(_BUSY_PAUSE_S)
                    continue
                if isinstance(self.last, CapacityError | RefusedError | OverloadedError):
                    # No other server has the blocks: that these are full, or refuse, is the true reason.
                    raise self.last from None
                is_help_coming = self.view.is_help_coming
                is_over = time.monotonic() - self._progress_at > (_HELP_S if is_help_coming else _PATIENCE_S)
                # A call that begins in an outage waits as one that began before it.
                is_outage = self.last is not None or bool(self.view.banned())
                is_hopeless = not is_help_coming and (not is_outage or self.failures >= self.limit)
                if is_hopeless or not self.may_pause or is_over:
                    if isinstance(self.last, MissingExpertsError):
                        # It names what to serve; more servers of the blocks would miss the same experts.
                        raise self.last from None
                    # The message holds the last failure and ends with the cure; no other traceback should hide it.
                    raise exc from None
                self.failures += not is_help_coming
                await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** max(0, self.failures - 1), _LONGEST_PAUSE_S))


class ChainRetries(Retries):
    """Retries of a call that runs blocks."""

    def __init__(self, view: SwarmView) -> None:
        super().__init__(view)
        self.view: SwarmView = view

    async def chain(self, blocks: range, demand: Demand) -> list[SpanChoice]:
        """Plans a chain; see `plan`."""

        async def make(without: set[str]) -> list[SpanChoice]:
            try:
                return await self.view.chain(blocks, demand, without=without, failure=self.last)
            except MissingBlocksError:
                if (filled := await self._filled(blocks, demand, without)) is None:
                    raise
                return filled

        return await self.plan(make)

    async def _filled(self, blocks: range, demand: Demand, without: set[str]) -> list[SpanChoice] | None:
        """Plans a chain in which others stand in for missing servers; None if that does not help."""
        if self.view.fallback is None:
            return None
        gaps = set(missing_blocks(self.view.usable(without), blocks, self.view.tied))
        found: list[SpanChoice] = []
        for is_gap, group in itertools.groupby(blocks, gaps.__contains__):
            run = list(group)
            part = range(run[0], run[-1] + 1)
            if not is_gap:
                found += await self.view.chain(part, demand, without=without, failure=self.last)
                continue
            here = await self.view.fallback.stand_in(part)
            if any(span.peer in without for span in here):
                return None
            found += here
        return found if gaps else None
