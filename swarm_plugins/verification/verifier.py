"""Guards a client's calls: a checked one is computed again here, from the input that the server got."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm_plugins.book.judging import When
from swarm_plugins.checkpoint.range_cache import default_cache
from swarm_plugins.client.calls.call import Answer, Call, Caller
from swarm_plugins.client.sessions.history import History
from swarm_plugins.errors import ProtocolError, SwarmError, one_line
from swarm_plugins.transport.receipts import check_receipt
from swarm_plugins.verification.checker import CheckedCaller, Checker, Finding, Server, checked_as
from swarm_plugins.verification.claims import BackwardClaim, ForwardClaim, StepClaim, claim_of
from swarm_plugins.verification.evidence import Evidence, Witnessed, evidence_of, evidence_of_session, save_evidence
from swarm_plugins.verification.examiner import Examiner
from swarm_plugins.verification.followed import FollowedSession
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks
from swarm_plugins.verification.norms import NormRanges, norm_ratio
from swarm_plugins.verification.quarantine import user_quarantine
from swarm_plugins.verification.recompute import Asked, check_kind, travelled
from swarm_plugins.verification.replay import read_session

if TYPE_CHECKING:
    from swarm_plugins.book.record import PeerBook
    from swarm_plugins.checkpoint import Checkpoint
    from swarm_plugins.client.config import SwarmConfig
    from swarm_plugins.client.servers import Servers
    from swarm_plugins.versions import ModelVersion

log = logging.getLogger(__name__)

_MAX_SHADOWS = 8
"""Sessions followed at a time."""
_FIRST_STEPS = 4
"""Steps of a new server's sessions that are checked before they are used."""
_STEPS_AT_ONCE = 8
"""Later steps of a session that are checked together."""


class Verifier:
    """Guards the calls of one client to one model's servers; see `Guard`.

    Args:
        checker: Keeps the books.
        blocks: Computes what servers should have computed.
        evidence: Folder for what they were caught with.
        version: Model version, for that.
    """

    def __init__(self, checker: Checker, blocks: LocalBlocks, *, evidence: Path, version: str) -> None:
        self.checker = checker
        self.evidence = evidence
        self.version = version
        self._blocks = blocks
        self._norms = NormRanges()
        self._shadows: weakref.WeakKeyDictionary[History, tuple[FollowedSession, When]] = weakref.WeakKeyDictionary()

    def is_excluded(self, peer: str) -> bool:
        """Returns whether a peer is in quarantine."""
        return peer in self.checker.quarantine

    def wrap(self, inner: Caller, servers: Servers) -> Caller:
        """Returns a caller that examines answers before they are used."""
        examiner = Examiner(servers, self._blocks)

        async def examine(call: Call[Any, Any], answer: Answer[Any, Any]) -> None:
            info = servers.view.said(answer.peer)
            if info is not None:
                await self._examine(claim_of(call, answer, info), examiner)

        return CheckedCaller(inner, self.checker, examine, servers.view.ban)

    async def close(self) -> None:
        """Ends the checks in the background. Idempotent."""
        await self.checker.close()

    async def _examine(self, claim: ForwardClaim | BackwardClaim | StepClaim, examiner: Examiner) -> None:
        if isinstance(claim, StepClaim):
            await self._examine_step(claim, examiner)
            return
        server = checked_as(claim.peer, "forward" if isinstance(claim, ForwardClaim) else "backward", claim.info)
        when = self.checker.when(server)
        if self._norms.is_odd(_norm_key(claim), _norm_ratio(claim)) and not self.checker.is_paused(server):
            when = "before"
        if when == "never":
            return
        # Copied now: what trains is changed in place by the next optimizer step.
        claim = _as_sent(claim)
        forward = claim.request if isinstance(claim, ForwardClaim) else claim.forward
        asked = Asked(forward, claim.adapters, Kind(claim.info.dtype, claim.info.quantization))
        if not asked.is_as_sent:
            log.debug("adapters have changed since %s answered: its answer cannot be checked", claim.peer)
            return
        await self.checker.run(server, when, functools.partial(self._found, examiner, claim, asked))

    async def _found(self, examiner: Examiner, claim: ForwardClaim | BackwardClaim, asked: Asked) -> Finding:
        """Checks a forward or a backward."""
        _check_receipts(claim, asked)
        found = await examiner.examine(claim, asked)
        if found.verdicts and not any(verdict.is_wrong for verdict in found.verdicts):
            self._norms.learn(_norm_key(claim), _norm_ratio(claim))

        def save(reason: str) -> str:
            return self._saved(evidence_of(claim, asked, found.opening, model=self.version, reason=reason))

        where = _where(range(asked.request.start, asked.request.end))
        return Finding(verdicts=found.verdicts, where=where, others=found.others, save=save)

    # -- sessions -----------------------------------------------------------------------------------------------------

    async def _examine_step(self, claim: StepClaim, examiner: Examiner) -> None:
        """Checks a step of a session that is followed here, or too large to be, or neither."""
        history, checker = claim.history, self.checker
        server = checked_as(claim.peer, "session step", claim.info)
        if not await self._can_hold(server, history.steps[-1].blocks):
            await self._examine_large(server, claim, examiner)
            return
        if len(history.steps) == 1:
            when = checker.when(server)
            # Of a new server the first steps are always checked, whatever other sessions are followed.
            if when == "before" or (when == "after" and len(self._shadows) < _MAX_SHADOWS):
                kind = Kind(claim.info.dtype, claim.info.quantization)
                session = FollowedSession(history, history.steps[0].blocks, claim.info.version, kind)
                self._shadows[history] = session, when
        if history not in self._shadows:
            return
        session, when = self._shadows[history]
        if not session.follows(history):
            # Its cache was cropped or reordered: what has been followed is no part of it any more.
            del self._shadows[history]
            return
        session.add(claim)
        compare = functools.partial(self._compared, server.peer, session)
        if when == "before" and len(history.steps) <= _FIRST_STEPS:
            await checker.run(server, "before", compare)
            if len(history.steps) == _FIRST_STEPS and len(self._shadows) > _MAX_SHADOWS:
                del self._shadows[history]
        elif session.shadow.num_waiting >= _STEPS_AT_ONCE and not checker.is_full:
            await checker.run(server, "after", compare)

    async def _can_hold(self, server: Server, blocks: range) -> bool:
        """Returns whether a session on some blocks can be followed here; without a checkpoint it cannot be checked."""
        try:
            return await self._blocks.can_hold(len(blocks))
        except SwarmError as exc:
            self.checker.say_unchecked(server, exc)
            return True

    async def _examine_large(self, server: Server, claim: StepClaim, examiner: Examiner) -> None:
        """Checks a step of a session that is too large to follow, or not."""
        when = self.checker.when(server)
        new, length = claim.request.hidden.shape[1], claim.history.length
        # The server repeats the whole session: rarely, then, when it is long.
        if when == "after" and self.checker.chance() * length > new:
            return
        await self.checker.run(server, when, functools.partial(self._repeated, examiner, claim))

    async def _compared(self, peer: str, session: FollowedSession) -> Finding:
        """Compares the last steps of a session that is followed."""
        verdicts = await session.compare(self._blocks)
        save = functools.partial(self._saved_session, peer, session.witnessed)
        return Finding(verdicts=verdicts, where=_where(session.shadow.blocks), save=save)

    async def _repeated(self, examiner: Examiner, claim: StepClaim) -> Finding:
        """Has a server repeat a session, and checks that."""
        verdicts, witnessed = await examiner.examine_session(claim)
        save = functools.partial(self._saved_session, claim.peer, lambda: witnessed)
        return Finding(verdicts=verdicts, where=_where(claim.history.steps[-1].blocks), save=save)

    # -- evidence -----------------------------------------------------------------------------------------------------

    def _saved(self, evidence: Evidence) -> str:
        """Saves the evidence of a wrong answer; returns its file, or nothing if it cannot be written."""
        try:
            return str(save_evidence(self.evidence, evidence).resolve())
        except OSError as exc:
            log.warning("cannot save the evidence against %s to %s: %s", evidence.peer, self.evidence, one_line(exc))
            return ""

    def _saved_session(self, peer: str, witness: Callable[[], Witnessed | None], reason: str) -> str:
        found = witness()
        if found is None:
            return ""
        evidence = evidence_of_session(peer, found, model=self.version, reason=reason)
        try:
            read_session(evidence)
        except ProtocolError as exc:
            log.warning("no evidence against %s is saved, it would convince nobody: %s", peer, one_line(exc))
            return ""
        return self._saved(evidence)


def make_guard(
    book: PeerBook, config: SwarmConfig, version: ModelVersion, open_checkpoint: Callable[[], Checkpoint]
) -> Verifier:
    """Returns what examines answers of the servers of a model version."""
    blocks = LocalBlocks(open_checkpoint, limit_bytes=config.verify_bytes, version=version)
    checker = Checker(book, user_quarantine(), model=str(version))
    return Verifier(checker, blocks, evidence=default_cache() / "evidence", version=str(version))


def _where(blocks: range) -> str:
    return f"blocks {blocks.start}:{blocks.stop}"


def _check_receipts(call: ForwardClaim | BackwardClaim, asked: Asked) -> None:
    """Raises ProtocolError unless the server has signed its answer, and what it says about itself."""
    if isinstance(call, ForwardClaim):
        receipt = check_receipt(call.peer, call.request, call.response)
    else:
        if call.request.forward is None:
            check_receipt(call.peer, call.forward, call.outputs)
        receipt = check_receipt(call.peer, call.request, call.response)
    check_kind(call.peer, receipt, asked.request.version, asked.kind)


def _norm_ratio(call: ForwardClaim | BackwardClaim) -> float:
    if isinstance(call, ForwardClaim):
        return norm_ratio(call.response.hidden, call.request.hidden)
    found = call.response.grad_hidden
    return 1.0 if found is None else norm_ratio(found, call.request.grad_hidden)


def _norm_key(call: ForwardClaim | BackwardClaim) -> tuple[str, int, int]:
    if isinstance(call, ForwardClaim):
        return "forward", call.request.start, call.request.end
    return "backward", call.forward.start, call.forward.end


def _as_sent(call: ForwardClaim | BackwardClaim) -> ForwardClaim | BackwardClaim:
    """Returns a call with copies of its messages, as they were on the other end of the wire."""
    if isinstance(call, ForwardClaim):
        codec = call.request.reply_codec
        return replace(call, request=travelled(call.request, codec), response=travelled(call.response, "none"))
    codec = call.request.reply_codec
    return replace(
        call,
        # Of a kept graph, the forward travelled as it said itself.
        forward=travelled(call.forward, call.forward.reply_codec if call.request.forward is None else codec),
        outputs=travelled(call.outputs, "none"),
        request=travelled(call.request, codec),
        response=travelled(call.response, "none"),
    )
