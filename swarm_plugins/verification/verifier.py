"""Guards a client's calls: a checked one is computed again here, from the input that the server got."""

from __future__ import annotations

import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from swarm_plugins.book.judging import When
from swarm_plugins.client.calls.call import Answer, Call
from swarm_plugins.client.sessions.history import History
from swarm_plugins.client.sessions.span import SentSession, StepCall
from swarm_plugins.errors import SwarmError
from swarm_plugins.transport.messages import ForwardRequest, ForwardResponse, SessionStep, SessionStepResponse
from swarm_plugins.verification.checker import Checker, CheckingGuard, Finding, Server, checked_as
from swarm_plugins.verification.claims import Claim, check_kind, travelled
from swarm_plugins.verification.examiner import Examiner, where
from swarm_plugins.verification.followed import FollowedSession
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks
from swarm_plugins.verification.norms import NormRanges, norm_ratio
from swarm_plugins.verification.quarantine import user_quarantine
from swarm_plugins.verification.scores import MIN_ROUGH_TOKENS

if TYPE_CHECKING:
    from swarm_plugins.book.record import PeerBook
    from swarm_plugins.checkpoint import Checkpoint
    from swarm_plugins.client.config import SwarmConfig
    from swarm_plugins.client.discovery.server_view import ServerView
    from swarm_plugins.transport.server_info import ServerInfo
    from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)

StepAnswer: TypeAlias = Answer[SessionStep, SessionStepResponse]
_MAX_SHADOWS = 8
"""Sessions followed at a time."""
_FIRST_STEPS = 4
"""Steps of a new server's sessions that are checked before they are used."""
_STEPS_AT_ONCE = 8
"""Later steps of a session that are checked together."""


class Verifier(CheckingGuard):
    """Guards the calls of one client to one model's servers; see `Guard`.

    Args:
        checker: Keeps the books.
        blocks: Computes what servers should have computed.
    """

    def __init__(self, checker: Checker, blocks: LocalBlocks) -> None:
        super().__init__(checker)
        self._blocks = blocks
        self._norms = NormRanges()
        self._shadows: weakref.WeakKeyDictionary[History, tuple[FollowedSession, When]] = weakref.WeakKeyDictionary()
        self._last: weakref.WeakKeyDictionary[History, deque[StepAnswer]] = weakref.WeakKeyDictionary()
        """Copies of the last short answers of sessions that are not followed."""

    async def examine(self, call: Call[Any, Any], answer: Answer[Any, Any], info: ServerInfo, view: ServerView) -> None:
        """Checks an answer, or not; see `CheckingGuard`."""
        examiner = Examiner(view, self._blocks)
        if isinstance(call, StepCall):
            await self._examine_step(call, answer, info, examiner)
            return
        claim = Claim.of(call, answer, info)
        server = checked_as(claim.peer, claim.what, info)
        when = self.checker.when(server)
        if self._norms.is_odd(_norm_key(claim), _norm_ratio(claim)) and not self.checker.is_paused(server):
            when = "before"
        if when == "never":
            return
        # Copied now: what trains is changed in place by the next optimizer step.
        claim = claim.as_sent()
        if not claim.is_as_sent:
            log.debug("adapters have changed since %s answered: its answer cannot be checked", claim.peer)
            return
        await self.checker.run(server, when, functools.partial(self._found, examiner, claim))

    async def probe(self, peer: str, forward: ForwardRequest, info: ServerInfo, view: ServerView) -> bool:
        """Asks a server for a forward without adapters and checks the answer; returns whether it could be checked.

        Raises:
            WrongAnswerError: If the answer is wrong.
            SwarmError: If there is none, or none of the right shape.
        """
        before, size = self.checker.checked.get(peer, 0), forward.hidden.shape[:2].numel()
        answer = await view.peers.request(
            peer, "rpc_forward", forward, ForwardResponse, units=size, blocks=forward.end - forward.start
        )
        kind = Kind(info.dtype, info.quantization)
        claim = Claim(peer=peer, kind=kind, forward=forward, outputs=answer).as_sent()
        claim.check_shape()
        examine = functools.partial(self._found, Examiner(view, self._blocks), claim)
        await self.checker.run(checked_as(peer, claim.what, info), "before", examine)
        return self.checker.checked.get(peer, 0) > before

    async def _found(self, examiner: Examiner, claim: Claim) -> Finding:
        """Checks a forward or a backward."""
        check_kind(claim.peer, claim.check_receipts(), claim.forward.version, claim.kind)
        found = await examiner.examine(claim)
        if found.verdicts and not any(verdict.is_wrong for verdict in found.verdicts):
            self._norms.learn(_norm_key(claim), _norm_ratio(claim))
        return found

    # -- sessions -----------------------------------------------------------------------------------------------------

    async def _examine_step(self, call: StepCall, answer: StepAnswer, info: ServerInfo, examiner: Examiner) -> None:
        """Checks a step of a session that is followed here, or too large to be, or neither."""
        history, checker = call.session.history, self.checker
        server = checked_as(answer.peer, "session step", info)
        if checker.is_paused(server) and history not in self._shadows:
            return
        if not await self._can_hold(server, call.blocks):
            await self._examine_unfollowed(call, answer, info, examiner, server)
            return
        if len(history.steps) == 1:
            when = checker.when(server)
            # Of a new server the first steps are always checked, whatever other sessions are followed.
            if when == "before" or (when == "after" and len(self._shadows) < _MAX_SHADOWS):
                kind = Kind(info.dtype, info.quantization)
                session = FollowedSession(history, call.blocks, info.version, kind)
                self._shadows[history] = session, when
        if history not in self._shadows:
            return
        session, when = self._shadows[history]
        if not session.follows(history):
            # Its cache was cropped or reordered: what has been followed is gone from it.
            del self._shadows[history]
            return
        session.add(call, answer, call.session.sent)
        compare = functools.partial(self._compared, server.peer, session)
        if when == "before" and len(history.steps) <= _FIRST_STEPS:
            await checker.run(server, "before", compare)
            if len(history.steps) == _FIRST_STEPS and len(self._shadows) > _MAX_SHADOWS:
                del self._shadows[history]
        elif session.shadow.num_waiting >= _STEPS_AT_ONCE and not checker.is_full:
            await checker.run(server, "after", compare)

    async def _examine_unfollowed(
        self, call: StepCall, answer: StepAnswer, info: ServerInfo, examiner: Examiner, server: Server
    ) -> None:
        """Checks some of the steps of a session on a span that does not fit here."""
        sent, checker = call.session.sent, self.checker
        before = self._before(call.session.history, sent, answer)
        when = checker.when(server)
        # The server repeats the whole session, so long ones are checked rarely.
        is_due = when == "before" or checker.chance() * call.session.history.length <= answer.request.hidden.shape[1]
        if when == "never" or not is_due:
            return
        repeat = functools.partial(examiner.examine_session, call, [*before, _copied(answer)], info, sent)
        await checker.run(server, when, repeat)

    def _before(self, history: History, sent: SentSession | None, answer: StepAnswer) -> list[StepAnswer]:
        """Returns copies of the answers right before one that may be too short to compare alone."""
        last = self._last.setdefault(history, deque(maxlen=MIN_ROUGH_TOKENS))
        is_next = last and sent is not None and len(sent.steps) > 1 and sent.steps[-2][0] is last[-1].request
        if not is_next:
            last.clear()
        before = list(last)
        if answer.request.hidden.shape[:2].numel() < MIN_ROUGH_TOKENS:
            last.append(_copied(answer))
            return before
        # A prompt's many tokens would hide a few wrong ones.
        last.clear()
        return []

    async def _can_hold(self, server: Server, blocks: range) -> bool:
        """Returns whether a session on some blocks can be followed here; without a checkpoint it cannot be checked."""
        try:
            return await self._blocks.can_hold(len(blocks))
        except SwarmError as exc:
            self.checker.say_unchecked(server, exc)
            return True

    async def _compared(self, peer: str, session: FollowedSession) -> Finding:
        """Compares the last steps of a session that is followed."""
        verdicts = await session.compare(self._blocks)
        evidence = functools.partial(session.evidence, peer)
        return Finding(verdicts=verdicts, where=where(session.shadow.blocks), evidence=evidence)


def make_guard(
    book: PeerBook, config: SwarmConfig, version: ModelVersion, open_checkpoint: Callable[[], Checkpoint]
) -> Verifier:
    """Returns what examines answers of the servers of a model version."""
    blocks = LocalBlocks(open_checkpoint, limit_bytes=config.verify_bytes, version=version)
    return Verifier(Checker(book, user_quarantine(), model=str(version)), blocks)


def _copied(answer: StepAnswer) -> StepAnswer:
    """Returns a copy, since the caller owns the answer now."""
    return answer._replace(response=travelled(answer.response, "none"))


def _norm_key(claim: Claim) -> tuple[str, int, int]:
    return claim.what, claim.blocks.start, claim.blocks.stop


def _norm_ratio(claim: Claim) -> float:
    if claim.backward is None:
        return norm_ratio(claim.outputs.hidden, claim.forward.hidden)
    request, response = claim.backward
    return 1.0 if response.grad_hidden is None else norm_ratio(response.grad_hidden, request.grad_hidden)
