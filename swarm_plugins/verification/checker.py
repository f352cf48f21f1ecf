"""Decides which answers are checked, and what becomes of their servers: of blocks, and of experts.

The first answers of a server are checked before they are used, later ones by chance and in the background. A server
with a wrong answer is quarantined, and the call goes to another one. Spot checks as Petals proposes them (Borzunov et
al. 2023, section 4).
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from swarm_plugins.book import judging
from swarm_plugins.book.judging import When
from swarm_plugins.book.record import Checked, PeerBook, Uncheckable
from swarm_plugins.client.calls.call import Answer, Call, Caller, Request, Response, WrongAnswerError
from swarm_plugins.errors import SwarmError, one_line
from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.verification.background import BackgroundChecks
from swarm_plugins.verification.local_blocks import UncheckableError
from swarm_plugins.verification.quarantine import Quarantine
from swarm_plugins.verification.scores import Verdict

log = logging.getLogger(__name__)


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
    save: Callable[[str], str] = lambda reason: ""
    """Saves what shows a third party that the answer is wrong; returns the file, empty if there is none."""


class Checker:
    """Keeps the books of checks.

    Args:
        book: What is known of the servers.
        quarantine: Where caught servers are listed.
        model: The model version, for that.
    """

    def __init__(self, book: PeerBook, quarantine: Quarantine, *, model: str) -> None:
        self.quarantine = quarantine
        self.checked: Counter[str] = Counter()
        """Checks that came to a result, by peer."""
        self.chance: Callable[[], float] = secrets.SystemRandom().random
        """Returns a number in [0, 1) that servers cannot foresee."""
        self._book = book
        self._model = model
        self._background = BackgroundChecks()

    @property
    def is_busy(self) -> bool:
        """Whether checks are under way in the background."""
        return self._background.is_busy

    @property
    def is_full(self) -> bool:
        """Whether so many checks are under way that an answer should rather wait for its own."""
        return self._background.is_full

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
        check = self._check(server, examine)
        if when == "before" or self._background.is_full:
            await check
        else:
            self._background.start(check, f"check {server.what} of {server.peer}")

    async def _check(self, server: Server, examine: Callable[[], Awaitable[Finding]]) -> None:
        try:
            finding = await examine()
        except UncheckableError as exc:
            self.say_unchecked(server, exc)
            return
        except SwarmError:
            # A server that does not stand by what it has answered is not believed.
            self._book.observe(server.peer, Checked(server[1:], is_right=False))
            raise
        self._judge(server, finding)

    def _judge(self, server: Server, finding: Finding) -> None:
        if not finding.verdicts:
            return
        self.checked[server.peer] += 1
        wrong = next((verdict for verdict in finding.verdicts if verdict.is_wrong), None)
        self._book.observe(server.peer, Checked(server[1:], is_right=wrong is None))
        if wrong is None:
            return
        reason = f"wrong {server.what} of {finding.where}: {wrong}"
        if finding.others:
            others = ", ".join(finding.others)
            raise WrongAnswerError(f"server {server.peer} gave another answer than {others}: {reason}")
        self.quarantine.add(server.peer, model=self._model, reason=reason, evidence=finding.save(reason))
        log.warning("server %s is quarantined for a day: %s", server.peer, reason)
        raise WrongAnswerError(f"server {server.peer} gave a wrong answer and is quarantined: {reason}")

    def say_unchecked(self, server: Server, exc: SwarmError) -> None:
        """Notes that a server's answers cannot be checked now, and says so once."""
        if self._book.is_news(server.peer, f"unchecked {server.what}"):
            log.warning("answers (%s) of server %s cannot be checked: %s", server.what, server.peer, one_line(exc))
        self._book.observe(server.peer, Uncheckable(server[1:]))

    async def close(self) -> None:
        """Ends the checks in the background. Idempotent."""
        await self._background.close()


class CheckedCaller:
    """Examines answers before they are used; see `Caller`.

    Args:
        inner: Asks servers.
        checker: Lists those that were caught.
        examine: Checks an answer, or not; raises SwarmError if it must not be used.
        ban: Leaves out a replica with a wrong answer.
    """

    def __init__(
        self,
        inner: Caller,
        checker: Checker,
        examine: Callable[[Call[Any, Any], Answer[Any, Any]], Awaitable[None]],
        ban: Callable[[str, BaseException], None],
    ) -> None:
        self._inner = inner
        self._checker = checker
        self._examine = examine
        self._ban = ban

    async def ask(self, call: Call[Request, Response], peer: str) -> Answer[Request, Response]:
        """Asks a server; a replica's wrong answer is not the server's fault, which is asked again."""
        while True:
            answer = await self._inner.ask(call, peer)
            try:
                # It may have been caught meanwhile, by a check in the background or by another client.
                if answer.peer in self._checker.quarantine:
                    raise WrongAnswerError(f"server {answer.peer} is in quarantine")
                await self._examine(call, answer)
            except SwarmError as exc:
                if answer.peer == peer:
                    raise
                self._ban(answer.peer, exc)
            else:
                return answer
