"""Decides which answers are checked, and what becomes of their servers: of blocks, and of experts.

The first answers of a server are checked before they are used, later ones by chance and in the background. A server
with a wrong answer is quarantined, and the call goes to another one. Spot checks as Petals proposes them (Borzunov et
al. 2023, section 4).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from swarm_plugins.book import judging
from swarm_plugins.book.judging import When
from swarm_plugins.book.record import Checked, Failed, PeerBook, Uncheckable
from swarm_plugins.checkpoint.range_cache import default_cache
from swarm_plugins.client.answers import OverloadedError, SpanMovedError
from swarm_plugins.client.calls.call import Answer, Call, Caller, Request, Response, WrongAnswerError
from swarm_plugins.client.discovery.server_view import ServerView
from swarm_plugins.errors import SwarmError, one_line
from swarm_plugins.recent import Recent
from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.verification.evidence import Evidence, save_evidence
from swarm_plugins.verification.local_blocks import UncheckableError, UncheckableRequestError
from swarm_plugins.verification.quarantine import Quarantine
from swarm_plugins.verification.replay import checked
from swarm_plugins.verification.scores import Verdict

log = logging.getLogger(__name__)

_MAX_WAITING = 4
"""Checks in the background."""
_NO_FAULT = (OverloadedError, SpanMovedError)
"""Failed checks that do not count against the server."""


class Server(NamedTuple):
    """What is checked for itself: a server that moves or loads other weights is new, and so is each kind of call."""

    peer: str
    what: str
    version: str
    share: tuple[object, ...]
    """What it serves of the model."""
    dtype: str
    quantization: str


def checked_as(peer: str, what: str, info: ServerInfo) -> Server:
    """Returns what one kind of answers of a server is checked as."""
    return Server(peer, what, info.version, (info.start, info.end, info.experts), info.dtype, info.quantization)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a check."""

    verdicts: Sequence[Verdict]
    where: str
    """What was checked, for messages."""
    others: tuple[str, ...] = ()
    """Servers whose word the verdicts rest on; none: the checkpoint's."""
    evidence: Callable[..., Evidence | None] = lambda model, reason: None
    """Takes the model version and the reason; returns what shows a third party that the answer is wrong, if anything
    does."""


class Checker:
    """Keeps the books of checks, and runs some of them beside the work of those who use the answers.

    Args:
        book: What is known of the servers.
        quarantine: Where caught servers are listed.
        model: The model version, for that.
        evidence: Folder for what servers were caught with. None: the user's.
    """

    def __init__(self, book: PeerBook, quarantine: Quarantine, *, model: str, evidence: Path | None = None) -> None:
        self.quarantine = quarantine
        self.checked: Recent[str, int] = Recent()
        """Checks that came to a result, by peer."""
        self.chance: Callable[[], float] = secrets.SystemRandom().random
        """Returns a number in [0, 1) that servers cannot foresee."""
        self._book = book
        self._model = model
        self._folder = evidence or default_cache() / "evidence"
        self._running: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether checks are under way in the background."""
        return bool(self._running)

    @property
    def is_full(self) -> bool:
        """Whether so many checks are under way that an answer should rather wait for its own."""
        return len(self._running) >= _MAX_WAITING

    def when(self, server: Server) -> When:
        """Returns when to check the next answer of a server."""
        return judging.when_checked(self._book, server.peer, server[1:], self.chance)

    def is_paused(self, server: Server) -> bool:
        """Returns whether a server's answers could not be checked a moment ago."""
        known = self._book[server.peer].checks.get(server[1:])
        return known is not None and self._book.now < known.paused_until

    async def run(self, server: Server, when: When, examine: Callable[[], Awaitable[Finding]]) -> None:
        """Checks an answer, before it is used or in the background; raises SwarmError if it must not be used."""
        if when == "never":
            return
        if when == "before" or self.is_full:
            await self._check(server, examine)
            return
        name = f"check {server.what} of {server.peer}"
        task = asyncio.create_task(self._check_quietly(server, examine), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _check_quietly(self, server: Server, examine: Callable[[], Awaitable[Finding]]) -> None:
        try:
            await self._check(server, examine)
        except SwarmError as exc:
            how = "was wrong" if isinstance(exc, WrongAnswerError) else "could not be checked"
            log.warning("an answer that has already been used %s: %s", how, exc)
            if not isinstance(exc, _NO_FAULT):
                # As after any failed call: the server may hide a lie, or the network is bad.
                self._book.observe(server.peer, Failed(one_line(exc)))

    async def _check(self, server: Server, examine: Callable[[], Awaitable[Finding]]) -> None:
        try:
            finding = await examine()
        except UncheckableError as exc:
            self.say_unchecked(server, exc)
            return
        except SwarmError as exc:
            # A server that does not stand by what it has answered is not believed.
            self._book.observe(
                server.peer, Checked(server[1:], is_right=False, is_doubt=not isinstance(exc, _NO_FAULT))
            )
            raise
        await self._judge(server, finding)

    async def _judge(self, server: Server, finding: Finding) -> None:
        if not finding.verdicts:
            return
        self.checked[server.peer] = self.checked.get(server.peer, 0) + 1
        wrong = next((verdict for verdict in finding.verdicts if verdict.is_wrong), None)
        self._book.observe(server.peer, Checked(server[1:], is_right=wrong is None))
        if wrong is None:
            return
        reason = f"wrong {server.what} of {finding.where}: {wrong}"
        if finding.others:
            others = ", ".join(finding.others)
            raise WrongAnswerError(f"server {server.peer} gave another answer than {others}: {reason}")
        self.quarantine.add(server.peer, model=self._model, reason=reason)
        log.warning("server %s is quarantined for a day: %s", server.peer, reason)
        # At times hundreds of MB are written and read again: not on the loop, and once nobody uses the server any more.
        if evidence := await asyncio.to_thread(self._saved, server.peer, finding, reason):
            self.quarantine.add(server.peer, model=self._model, reason=reason, evidence=evidence)
        raise WrongAnswerError(f"server {server.peer} gave a wrong answer and is quarantined: {reason}")

    def _saved(self, peer: str, finding: Finding, reason: str) -> str:
        """Saves the evidence of a wrong answer; returns its file, or nothing if there is none."""
        try:
            evidence = finding.evidence(model=self._model, reason=reason)
            if evidence is None:
                return ""
            checked(evidence)
            return str(save_evidence(self._folder, evidence).resolve())
        except SwarmError as exc:
            log.warning("no evidence against %s is saved, it would convince nobody: %s", peer, one_line(exc))
        except (OSError, MemoryError, RuntimeError) as exc:
            log.warning("cannot save the evidence against %s to %s: %s", peer, self._folder, one_line(exc))
        return ""

    def say_unchecked(self, server: Server, exc: SwarmError) -> None:
        """Logs once that answers cannot be checked, and pauses the server's checks unless the request is at fault."""
        if self._book.is_news(server.peer, f"unchecked {server.what}"):
            log.warning("answers (%s) of server %s cannot be checked: %s", server.what, server.peer, one_line(exc))
        if not isinstance(exc, UncheckableRequestError):
            self._book.observe(server.peer, Uncheckable(server[1:]))

    async def close(self) -> None:
        """Ends the checks in the background. Idempotent."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class CheckingGuard(ABC):
    """Examines answers of the servers of one model, and leaves out those in quarantine; see `Guard`.

    Args:
        checker: Keeps the books.
    """

    def __init__(self, checker: Checker) -> None:
        self.checker = checker

    def is_excluded(self, peer: str) -> bool:
        """Returns whether a peer is in quarantine."""
        return peer in self.checker.quarantine

    def wrap(self, inner: Caller, view: ServerView) -> Caller:
        """Returns a caller that examines answers before they are used."""
        return CheckedCaller(inner, view, self)

    async def check(self, call: Call[Any, Any], answer: Answer[Any, Any], view: ServerView) -> None:
        """Examines an answer before it is used.

        Raises:
            SwarmError: If it is wrong, or its server has been caught or moved meanwhile.
        """
        # It may have been caught by a check in the background or by another client.
        if self.is_excluded(answer.peer):
            raise WrongAnswerError(f"server {answer.peer} is in quarantine")
        info = view.said(answer.peer)
        if info is not None:
            await self.examine(call, answer, info, view)
        elif view.peers.book[answer.peer].info is not None:
            # To others: a stand-in in this process, which needs no check, says nothing at all.
            raise SpanMovedError(f"server {answer.peer} says that it serves another version of the model")

    @abstractmethod
    async def examine(self, call: Call[Any, Any], answer: Answer[Any, Any], info: ServerInfo, view: ServerView) -> None:
        """Checks an answer of a server that says ``info`` of itself, or not.

        Raises:
            SwarmError: If the answer must not be used.
        """

    async def close(self) -> None:
        """Ends the checks in the background. Idempotent."""
        await self.checker.close()


class CheckedCaller:
    """Has a guard examine answers before they are used; see `Caller`."""

    def __init__(self, inner: Caller, view: ServerView, guard: CheckingGuard) -> None:
        self._inner = inner
        self._view = view
        self._guard = guard

    async def ask(self, call: Call[Request, Response], peer: str) -> Answer[Request, Response]:
        """Asks a server; a replica's wrong answer is not the server's fault, which is asked again."""
        while True:
            answer = await self._inner.ask(call, peer)
            try:
                await self._guard.check(call, answer, self._view)
            except SwarmError as exc:
                if answer.peer == peer:
                    raise
                self._view.ban(answer.peer, exc)
            else:
                return answer
