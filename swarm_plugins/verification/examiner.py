"""How an answer is checked: the whole span here, two opened blocks of it here, or the same request elsewhere."""

from __future__ import annotations

import functools
import itertools
import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from swarm_plugins.block_io import AdapterUse, LoadedAdapter
from swarm_plugins.client.calls.call import Answer, WrongAnswerError
from swarm_plugins.client.discovery.server_view import ServerView
from swarm_plugins.client.servers import NONCE_BYTES
from swarm_plugins.client.sessions.history import History
from swarm_plugins.client.sessions.span import SentSession, StepCall
from swarm_plugins.errors import CapacityError, ProtocolError, SwarmError, one_line
from swarm_plugins.transport.messages import (
    BackwardResponse,
    ForwardRequest,
    ForwardResponse,
    SessionStep,
    SessionStepResponse,
)
from swarm_plugins.transport.receipts import check_receipt, history_after
from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.verification.checker import Finding
from swarm_plugins.verification.claims import Claim, arrived, check_kind, copied
from swarm_plugins.verification.evidence import evidence_of, evidence_of_session
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks, UncheckableError, UncheckableRequestError
from swarm_plugins.verification.openings import Opening, open_blocks
from swarm_plugins.verification.recompute import recompute
from swarm_plugins.verification.repeated import check_repeatable, repeated_forward, session_history
from swarm_plugins.verification.scores import Verdict

log = logging.getLogger(__name__)

_MAX_OTHERS = 2
"""Servers that are asked the same; the second one decides whom of the first two to doubt."""


class Examiner:
    """Checks answers.

    Args:
        view: Servers of the model, to open blocks or to ask the same.
        blocks: Computes blocks here.
    """

    def __init__(self, view: ServerView, blocks: LocalBlocks) -> None:
        self._view = view
        self._blocks = blocks

    async def examine(self, claim: Claim) -> Finding:
        """Checks the answer to a forward or a backward.

        Raises:
            UncheckableRequestError: If that is not possible with this request.
            UncheckableError: If that is not possible now.
            SwarmError: If the server does not open what it has answered.
        """
        num_blocks, opening, grad = len(claim.blocks), None, None
        # Right openings prove nothing about an answer that is too short to compare.
        if claim.backward is None and not claim.can_tell(is_mixture=self._blocks.has_experts(claim.blocks)):
            return Finding(verdicts=[], where=where(claim.blocks))
        try:
            is_small = num_blocks == 1 or await self._blocks.can_hold(num_blocks)
        except SwarmError as exc:
            return await self._elsewhere(claim, exc)
        if claim.backward is not None and not is_small:
            request = claim.backward[0]
            if request.grad_hidden_states or request.grad_router_logits:
                # These gradients enter between the blocks, where the server would have to know them to commit.
                cause = UncheckableRequestError("gradients of inner states cannot be opened")
                return await self._elsewhere(claim, cause)
            grad = request.grad_hidden
        try:
            if not is_small:
                opening = await self._opened(claim, grad)
        except CapacityError as exc:
            # All states between the blocks take more memory than the answer did.
            return await self._elsewhere(claim, exc)
        try:
            verdicts = await recompute(claim, opening, self._blocks)
        except SwarmError as exc:
            return await self._elsewhere(claim, exc)
        evidence = functools.partial(evidence_of, claim, opening)
        return Finding(verdicts=verdicts, where=where(claim.blocks), evidence=evidence)

    async def examine_session(
        self,
        call: StepCall,
        answers: Sequence[Answer[SessionStep, SessionStepResponse]],
        info: ServerInfo,
        sent: SentSession | None,
    ) -> Finding:
        """Checks a step of a session by two opened blocks: has the server repeat the session as one forward.

        Args:
            call: The step.
            answers: Copies of the answer and of those right before it: as many are compared as it takes. If all
                together are too few tokens, there is no verdict.
            info: What the server says about itself.
            sent: All messages of the session. None: it is a fork, or its cache has been changed.

        Raises:
            UncheckableRequestError: If the session cannot be repeated as one forward: it began with a prefix, its
                adapters changed, or it is longer than what the server takes at once.
            UncheckableError: If the blocks cannot be run here, or the server has no room for the states.
            SwarmError: If the server does not open the forward.
        """
        kind, version, history = Kind(info.dtype, info.quantization), self._view.version.key, call.session.history
        asked = _asked_until(answers[-1], sent)
        _check_size(asked, history, sent, info)
        steps, before = list(itertools.starmap(arrived, asked)), b""
        if sent is not None:
            use = AdapterUse(adapters=call.adapters, rows=steps[-1].adapter_rows)
            history = session_history(sent.opened, ((one, use) for one in steps))
        forward = repeated_forward(history, steps[-1], version)
        if len(history.steps) > 1:
            await check_repeatable(range(forward.start, forward.end), kind, self._blocks)
        claim = self._session_claim(forward, kind, copied(call.adapters), answers)
        if claim is None:
            return Finding(verdicts=[], where=where(call.blocks))
        if not claim.is_as_sent:
            raise UncheckableRequestError("the session's adapters have changed since")
        responses = [answer.response for answer in answers[-len(claim.steps) :]]
        if sent is not None:
            before = history_after(sent.opened, steps[: -len(responses)])
        for step, response in zip(steps[-len(responses) :], responses, strict=True):
            receipt, before = check_receipt(claim.peer, step, response, before)
            check_kind(claim.peer, receipt, version, kind)
        try:
            opening = await self._opened(claim, None)
        except CapacityError as exc:
            raise UncheckableError(one_line(exc)) from exc
        try:
            verdicts = await recompute(claim, opening, self._blocks)
        except SwarmError as exc:
            raise UncheckableError(one_line(exc)) from exc
        found = Finding(verdicts=verdicts, where=where(claim.blocks))
        if sent is None or not before:
            return found
        shown = (claim.peer, sent.opened, steps, responses, claim.adapters, opening)
        return replace(found, evidence=functools.partial(evidence_of_session, *shown))

    def _session_claim(
        self,
        forward: ForwardRequest,
        kind: Kind,
        adapters: tuple[LoadedAdapter, ...],
        answers: Sequence[Answer[SessionStep, SessionStepResponse]],
    ) -> Claim | None:
        """Returns a claim about as few of the last answers as can be compared; None if they have too few tokens."""
        is_mixture = self._blocks.has_experts(range(forward.start, forward.end))
        for first in reversed(range(len(answers))):
            last = tuple((one.response.hidden, one.request.reply_codec) for one in answers[first:])
            outputs = ForwardResponse(hidden=torch.cat([hidden for hidden, _ in last], dim=1))
            claim = Claim(
                peer=answers[-1].peer, kind=kind, adapters=adapters, forward=forward, outputs=outputs, steps=last
            )
            if claim.can_tell(is_mixture=is_mixture):
                return claim
        return None

    async def _opened(self, claim: Claim, grad: Tensor | None) -> Opening:
        peers, tied, nonce = self._view.peers, self._view.tied, secrets.token_bytes(NONCE_BYTES)
        ask = functools.partial(open_blocks, peers, claim.peer, claim.forward, grad=grad, nonce=nonce, tied=tied)
        opening = await peers.with_adapters(claim.peer, claim.adapters, ask)
        for state in opening.states.values():
            # Otherwise it could not be computed with here, which looks like a fault of this machine.
            if str(state.dtype) != f"torch.{claim.kind.dtype}":
                raise ProtocolError(
                    f"server {claim.peer} opened a state of {state.dtype}, computes in {claim.kind.dtype}"
                )
        return opening

    async def _elsewhere(self, claim: Claim, cause: SwarmError) -> Finding:
        """Compares an answer with other servers' until one of them agrees, or two differ from it."""
        differing: list[Claim] = []
        verdicts: list[Verdict] = []
        for peer in self._others(claim):
            try:
                other = await self._asked(peer, claim)
                other.check_shape()
            except SwarmError as exc:
                log.debug("server %s did not help to check another: %s", peer, exc)
                continue
            verdicts = _compared(claim, other)
            if not _is_wrong(verdicts):
                # Of the others, one is alone against these two.
                self._leave_out(differing, claim.peer)
                return _found_elsewhere(claim, verdicts, [*differing, other])
            differing.append(other)
            if len(differing) == _MAX_OTHERS:
                break
        if not differing:
            kind = UncheckableRequestError if isinstance(cause, UncheckableRequestError) else UncheckableError
            raise kind(f"{one_line(cause)}; and no other server of the same kind holds these blocks")
        first, last = differing[0], differing[-1]
        if first is last or _is_wrong(_compared(first, last)):
            # No two agree, so the other may be wrong as well.
            self._leave_out(differing[:1], claim.peer)
        return _found_elsewhere(claim, verdicts, differing)

    def _leave_out(self, differing: Sequence[Claim], from_whom: str) -> None:
        for other in differing:
            self._view.ban(other.peer, WrongAnswerError(f"server {other.peer} differs from {from_whom}"))

    def _others(self, claim: Claim) -> list[str]:
        """Returns other servers of the same kind that hold the blocks, in random order."""
        same = []
        for entry in self._view.usable({claim.peer}):
            info, blocks = self._view.said(entry.peer), claim.blocks
            is_same = info is not None and claim.kind.computes_like(Kind(info.dtype, info.quantization))
            if is_same and entry.start <= blocks.start and blocks.stop <= entry.end:
                same.append(entry.peer)
        secrets.SystemRandom().shuffle(same)
        return same

    async def _asked(self, peer: str, claim: Claim) -> Claim:
        """Asks another server the same."""
        peers = self._view.peers
        forward: ForwardRequest = msgspec.structs.replace(
            claim.forward, keep=False, nonce=secrets.token_bytes(NONCE_BYTES)
        )
        size = {"units": forward.hidden.shape[:2].numel(), "blocks": len(claim.blocks)}
        if claim.backward is None:
            outputs = await peers.with_adapters(
                peer, claim.adapters, lambda: peers.request(peer, "rpc_forward", forward, ForwardResponse, **size)
            )
            return replace(claim, peer=peer, outputs=outputs)
        request = msgspec.structs.replace(claim.backward[0], ticket=None, forward=forward)
        gradients = await peers.with_adapters(
            peer, claim.adapters, lambda: peers.request(peer, "rpc_backward", request, BackwardResponse, **size)
        )
        return replace(claim, peer=peer, backward=(request, gradients))


def _asked_until(
    answer: Answer[SessionStep, SessionStepResponse], sent: SentSession | None
) -> list[tuple[SessionStep, bool]]:
    """Returns the steps up to an answer, or only the last if some are unknown, and whether each input was pushed."""
    if sent is None:
        return [(answer.request, answer.is_pushed)]
    # It grows while a check waits for its turn.
    end = max(index for index, (step, _) in enumerate(sent.steps) if step is answer.request) + 1
    return sent.steps[:end]


def _check_size(
    asked: Sequence[tuple[SessionStep, bool]], history: History, sent: SentSession | None, info: ServerInfo
) -> None:
    """Raises UncheckableRequestError unless the server can repeat a session as one forward."""
    last, _ = asked[-1]
    if history.prefix:
        raise UncheckableRequestError("the session cannot be repeated as one forward: it began with a prefix")
    if any((step.adapters, step.adapter_rows) != (last.adapters, last.adapter_rows) for step, _ in asked):
        raise UncheckableRequestError("the session cannot be repeated as one forward: its adapters have changed")
    length = history.length if sent is None else sum(step.hidden.shape[1] for step, _ in asked)
    num_tokens = last.hidden.shape[0] * length
    if 0 < info.max_batch_tokens < num_tokens:
        raise UncheckableRequestError(f"{num_tokens} tokens are more than the server takes at once")


def _compared(one: Claim, other: Claim) -> list[Verdict]:
    return one.verdicts(other.results(), is_mixture=True)


def _found_elsewhere(claim: Claim, verdicts: Sequence[Verdict], others: Sequence[Claim]) -> Finding:
    return Finding(verdicts=verdicts, where=where(claim.blocks), others=tuple(other.peer for other in others))


def _is_wrong(verdicts: Sequence[Verdict]) -> bool:
    return any(verdict.is_wrong for verdict in verdicts)


def where(blocks: range) -> str:
    """Returns what was checked, for messages."""
    return f"blocks {blocks.start}:{blocks.stop}"
