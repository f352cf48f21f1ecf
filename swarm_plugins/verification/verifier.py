"""Spot checks of servers' answers, as Petals proposes them (Borzunov et al. 2023, section 4).

A checked call is computed again here, from the input that the server got. The first calls of a server are checked
before their answers are used, later ones by chance and in the background. A server with a wrong answer is quarantined,
and the call goes to another one.
"""

from __future__ import annotations

import logging
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from swarm_plugins.checkpoint.range_cache import default_cache
from swarm_plugins.client.observer import (
    BackwardCall,
    CallObserver,
    ForwardCall,
    NoObserver,
    StepCall,
    WrongAnswerError,
)
from swarm_plugins.client.sessions.history import History
from swarm_plugins.errors import ProtocolError, SwarmError, one_line
from swarm_plugins.transport.receipts import check_receipt
from swarm_plugins.verification.background import BackgroundChecks
from swarm_plugins.verification.evidence import Evidence, Witnessed, evidence_of, evidence_of_session, save_evidence
from swarm_plugins.verification.examiner import NONCE_BYTES, Examiner
from swarm_plugins.verification.followed import FollowedSession
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks, UncheckableError
from swarm_plugins.verification.norms import NormRanges, norm_ratio
from swarm_plugins.verification.quarantine import Quarantine, user_quarantine
from swarm_plugins.verification.rates import CheckRates, When
from swarm_plugins.verification.reading import read_session
from swarm_plugins.verification.recompute import Asked, check_kind, travelled
from swarm_plugins.verification.scores import Verdict

if TYPE_CHECKING:
    from swarm_plugins.checkpoint import Checkpoint
    from swarm_plugins.client.discovery.view import Servers

log = logging.getLogger(__name__)

_MAX_SHADOWS = 8
"""Sessions followed at a time."""
_FIRST_STEPS = 4
"""Steps of a new server's sessions that are checked before they are used."""
_UNCHECKED_S = 60.0
"""Pause after an answer could not be checked, for want of weights and of other servers."""
_STEPS_AT_ONCE = 8
"""Later steps of a session that are checked together."""


class Server(NamedTuple):
    """What is checked for itself: a server that moves or loads other weights is new, and so is each kind of call."""

    peer: str
    what: str
    start: int
    end: int
    dtype: str
    quantization: str


class Verifier:
    """Observes the calls of one client to one model's servers; see `CallObserver`.

    Args:
        servers: The model's servers.
        blocks: Computes what servers should have computed.
        quarantine: Where caught servers are listed.
        evidence: Folder for what they were caught with.
        version: Model version, for both.
    """

    def __init__(
        self, servers: Servers, blocks: LocalBlocks, quarantine: Quarantine, *, evidence: Path, version: str
    ) -> None:
        self.quarantine = quarantine
        self.evidence = evidence
        self.version = version
        self.rates = CheckRates()
        """Which calls are checked."""
        self.checked: Counter[str] = Counter()
        """Checks that came to a result, by peer."""
        self._blocks = blocks
        self._norms = NormRanges()
        self._examiner = Examiner(servers, blocks)
        self._background = BackgroundChecks()
        self._shadows: weakref.WeakKeyDictionary[History, tuple[FollowedSession, When]] = weakref.WeakKeyDictionary()
        self._unchecked: dict[Server, float] = {}
        """Servers whose answers could not be checked, and when to try again."""

    @property
    def is_busy(self) -> bool:
        """Whether checks are under way in the background."""
        return self._background.is_busy

    def is_excluded(self, peer: str) -> bool:
        """Returns whether a peer is in quarantine."""
        return peer in self.quarantine

    def nonce(self) -> bytes:
        """Returns random bytes: every answer needs a receipt, as servers must not know which ones are checked."""
        return secrets.token_bytes(NONCE_BYTES)

    async def forward_done(self, call: ForwardCall) -> None:
        """Checks a forward, or not; see `CallObserver`."""
        await self._examine(call, "forward")

    async def backward_done(self, call: BackwardCall) -> None:
        """Checks a backward, or not; see `CallObserver`."""
        await self._examine(call, "backward")

    async def step_done(self, call: StepCall) -> None:
        """Checks a step of a session whose steps are all checked, or not; see `CallObserver`."""
        info, history = call.info, call.history
        self._check_not_excluded(call.peer)
        if info is None:
            return
        server = Server(call.peer, "session step", info.start, info.end, info.dtype, info.quantization)
        if not await self._can_hold(server, history.steps[-1].blocks):
            await self._examine_step(server, call)
            return
        if len(history.steps) == 1:
            when = self._when(server)
            # Of a new server the first steps are always checked, whatever other sessions are followed.
            if when == "before" or (when == "after" and len(self._shadows) < _MAX_SHADOWS):
                kind = Kind(info.dtype, info.quantization)
                self._shadows[history] = (
                    FollowedSession(history, history.steps[0].blocks, info.version, kind),
                    when,
                )
        if history not in self._shadows:
            return
        session, when = self._shadows[history]
        if not session.follows(history):
            # Its cache was cropped or reordered: what has been followed is no part of it any more.
            del self._shadows[history]
            return
        session.add(call)
        if when == "before" and len(history.steps) <= _FIRST_STEPS:
            await self._compare(server, session)
            if len(history.steps) == _FIRST_STEPS and len(self._shadows) > _MAX_SHADOWS:
                del self._shadows[history]
        elif session.shadow.num_waiting >= _STEPS_AT_ONCE and not self._background.is_full:
            self._background.start(self._compare(server, session), f"check a session of {call.peer}")

    async def _compare(self, server: Server, session: FollowedSession) -> None:
        """Compares the last steps of a session that is followed."""
        try:
            verdicts = await session.compare(self._blocks)
        except UncheckableError as exc:
            self._say_unchecked(server, exc)
            return
        self._judge_session(server, session.shadow.blocks, verdicts, session.witnessed)

    async def _can_hold(self, server: Server, blocks: range) -> bool:
        """Returns whether a session on some blocks can be followed here; without a checkpoint it cannot be checked."""
        try:
            return await self._blocks.can_hold(len(blocks))
        except SwarmError as exc:
            self._say_unchecked(server, exc)
            return True

    async def _examine_step(self, server: Server, call: StepCall) -> None:
        """Checks a step of a session that is too large to follow, or not."""
        when = self._when(server)
        new, length = call.request.hidden.shape[1], call.history.length
        # The server repeats the whole session: rarely, then, when it is long.
        if when == "never" or (when == "after" and self.rates.chance() * length > new):
            return
        check = self._repeat(server, call)
        if when == "before":
            await check
        else:
            self._background.start(check, f"check a session of {call.peer}")

    async def stand_in(self, blocks: range) -> str:
        """Knows no other peer."""
        return ""

    async def close(self) -> None:
        """Ends the checks in the background. Idempotent."""
        await self._background.close()

    async def _examine(self, call: ForwardCall | BackwardCall, what: str) -> None:
        info = call.info
        self._check_not_excluded(call.peer)
        if info is None:
            return
        server = Server(call.peer, what, info.start, info.end, info.dtype, info.quantization)
        when = self._when(server)
        ratio = _norm_ratio(call)
        if self._norms.is_odd(_norm_key(call), ratio) and server not in self._unchecked:
            when = "before"
        if when == "never":
            return
        # Copied now: what trains is changed in place by the next optimizer step.
        call = _as_sent(call)
        forward = call.request if isinstance(call, ForwardCall) else call.forward
        asked = Asked(forward, call.adapters, Kind(info.dtype, info.quantization))
        if not asked.is_as_sent:
            log.debug("adapters have changed since %s answered: its answer cannot be checked", call.peer)
            return
        check = self._check(server, call, asked)
        if when == "before" or self._background.is_full:
            await check
        else:
            self._background.start(check, f"check {what} of {call.peer}")

    def _when(self, server: Server) -> When:
        return "never" if time.monotonic() < self._unchecked.get(server, 0.0) else self.rates.when(server)

    def _check_not_excluded(self, peer: str) -> None:
        """Refuses answers of a server that was caught meanwhile: by a check in the background, or another client."""
        if peer in self.quarantine:
            raise WrongAnswerError(f"server {peer} is in quarantine")

    async def _check(self, server: Server, call: ForwardCall | BackwardCall, asked: Asked) -> None:
        try:
            _check_receipts(call, asked)
        except ProtocolError:
            self.rates.doubt(server)
            raise
        try:
            found = await self._examiner.examine(call, asked)
        except UncheckableError as exc:
            self._say_unchecked(server, exc)
            return
        except SwarmError:
            # A server that does not open what it has answered is not believed.
            self.rates.doubt(server)
            raise
        blocks = range(asked.request.start, asked.request.end)
        reason = self._judged(server, blocks, found.verdicts)
        if not reason:
            self._norms.learn(_norm_key(call), _norm_ratio(call))
            return
        if found.others:
            raise WrongAnswerError(f"server {call.peer} gave another answer than {', '.join(found.others)}: {reason}")
        evidence = evidence_of(call, asked, found.opening, model=self.version, reason=reason)
        self._convict(server, reason, self._saved(evidence))

    async def _repeat(self, server: Server, call: StepCall) -> None:
        """Has a server repeat a session, and checks that."""
        blocks = call.history.steps[-1].blocks
        try:
            verdicts, witnessed = await self._examiner.examine_session(call)
        except UncheckableError as exc:
            self._say_unchecked(server, exc)
            return
        self._judge_session(server, blocks, verdicts, lambda: witnessed)

    def _judge_session(
        self, server: Server, blocks: range, verdicts: Sequence[Verdict], witness: Callable[[], Witnessed | None]
    ) -> None:
        reason = self._judged(server, blocks, verdicts)
        if reason:
            found = witness()
            self._convict(server, reason, "" if found is None else self._saved_session(server.peer, found, reason))

    def _judged(self, server: Server, blocks: range, verdicts: Sequence[Verdict]) -> str:
        """Notes the result of a check; returns what is wrong, if anything."""
        if not verdicts:
            return ""
        self.checked[server.peer] += 1
        wrong = next((verdict for verdict in verdicts if verdict.is_wrong), None)
        if wrong is None:
            self.rates.passed(server)
            return ""
        self.rates.doubt(server)
        return f"wrong {server.what} of blocks {blocks.start}:{blocks.stop}: {wrong}"

    def _convict(self, server: Server, reason: str, evidence: str) -> NoReturn:
        self.quarantine.add(server.peer, model=self.version, reason=reason, evidence=evidence)
        log.warning("server %s is quarantined for a day: %s", server.peer, reason)
        raise WrongAnswerError(f"server {server.peer} gave a wrong answer and is quarantined: {reason}")

    def _say_unchecked(self, server: Server, exc: SwarmError) -> None:
        if server not in self._unchecked:
            log.warning("answers (%s) of server %s cannot be checked: %s", server.what, server.peer, one_line(exc))
        self._unchecked[server] = time.monotonic() + _UNCHECKED_S

    def _saved(self, evidence: Evidence) -> str:
        """Saves the evidence of a wrong answer; returns its file, or nothing if it cannot be written."""
        try:
            return str(save_evidence(self.evidence, evidence).resolve())
        except OSError as exc:
            log.warning("cannot save the evidence against %s to %s: %s", evidence.peer, self.evidence, one_line(exc))
            return ""

    def _saved_session(self, peer: str, found: Witnessed, reason: str) -> str:
        evidence = evidence_of_session(peer, found, model=self.version, reason=reason)
        try:
            read_session(evidence)
        except ProtocolError as exc:
            log.warning("no evidence against %s is saved, it would convince nobody: %s", peer, one_line(exc))
            return ""
        return self._saved(evidence)


def make_observer(servers: Servers, open_checkpoint: Callable[[], Checkpoint]) -> CallObserver:
    """Returns the observer that a client's settings ask for."""
    config = servers.view.config
    if not config.wants_checks(servers.view.initial_peers):
        return NoObserver()
    blocks = LocalBlocks(open_checkpoint, limit_bytes=config.verify_bytes, version=servers.view.version)
    evidence = default_cache() / "evidence"
    return Verifier(servers, blocks, user_quarantine(), evidence=evidence, version=str(servers.view.version))


def _check_receipts(call: ForwardCall | BackwardCall, asked: Asked) -> None:
    """Raises ProtocolError unless the server has signed its answer, and what it says about itself."""
    if isinstance(call, ForwardCall):
        receipt = check_receipt(call.peer, call.request, call.response)
    else:
        if call.request.forward is None:
            check_receipt(call.peer, call.forward, call.outputs)
        receipt = check_receipt(call.peer, call.request, call.response)
    check_kind(call.peer, receipt, asked.request.version, asked.kind)


def _norm_ratio(call: ForwardCall | BackwardCall) -> float:
    if isinstance(call, ForwardCall):
        return norm_ratio(call.response.hidden, call.request.hidden)
    found = call.response.grad_hidden
    return 1.0 if found is None else norm_ratio(found, call.request.grad_hidden)


def _norm_key(call: ForwardCall | BackwardCall) -> tuple[str, int, int]:
    if isinstance(call, ForwardCall):
        return "forward", call.request.start, call.request.end
    return "backward", call.forward.start, call.forward.end


def _as_sent(call: ForwardCall | BackwardCall) -> ForwardCall | BackwardCall:
    """Returns a call with copies of its messages, as they were on the other end of the wire."""
    if isinstance(call, ForwardCall):
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
