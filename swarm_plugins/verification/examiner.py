"""How an answer is checked: the whole span here, two opened blocks of it here, or the same request elsewhere."""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from swarm_plugins.block_io import AdapterUse
from swarm_plugins.client.calls.call import WrongAnswerError
from swarm_plugins.client.servers import NONCE_BYTES
from swarm_plugins.errors import CapacityError, SwarmError, one_line
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    ForwardResponse,
    SessionStep,
)
from swarm_plugins.transport.receipts import check_step_receipt, history_after
from swarm_plugins.verification.claims import BackwardClaim, ForwardClaim, StepClaim
from swarm_plugins.verification.evidence import Witnessed
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks, UncheckableError
from swarm_plugins.verification.openings import Opening, open_blocks
from swarm_plugins.verification.recompute import (
    Asked,
    backward_verdicts,
    check_kind,
    forward_verdicts,
    recompute_backward,
    recompute_forward,
    recompute_opened,
    travelled,
)
from swarm_plugins.verification.repeated import check_repeatable, repeated_forward, session_history
from swarm_plugins.verification.scores import Verdict

if TYPE_CHECKING:
    from swarm_plugins.client.servers import Servers

log = logging.getLogger(__name__)

_Response = ForwardResponse | BackwardResponse
_MAX_OTHERS = 2
"""Servers that are asked the same; the second one decides whom of the first two to doubt."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a check."""

    verdicts: list[Verdict]
    opening: Opening | None = None
    """What the server has opened, if only some blocks were computed here."""
    others: tuple[str, ...] = ()
    """Servers whose word the verdicts rest on; none: the checkpoint's."""


class Examiner:
    """Checks answers.

    Args:
        servers: Servers of the model, to open blocks or to ask the same.
        blocks: Computes blocks here.
    """

    def __init__(self, servers: Servers, blocks: LocalBlocks) -> None:
        self._servers = servers
        self._blocks = blocks

    async def examine(self, call: ForwardClaim | BackwardClaim, asked: Asked) -> Found:
        """Checks an answer.

        Raises:
            UncheckableError: If that is not possible now.
            SwarmError: If the server does not open what it has answered.
        """
        num_blocks = asked.request.end - asked.request.start
        try:
            if num_blocks == 1 or await self._blocks.can_hold(num_blocks):
                if isinstance(call, ForwardClaim):
                    return Found(verdicts=await recompute_forward(asked, call.response, self._blocks))
                return Found(verdicts=await recompute_backward(asked, call.request, call.response, self._blocks))
        except SwarmError as exc:
            return await self._elsewhere(call, asked, exc)
        if isinstance(call, BackwardClaim) and (call.request.grad_hidden_states or call.request.grad_router_logits):
            # These gradients enter between the blocks, where the server would have to know them to commit.
            return await self._elsewhere(call, asked, UncheckableError("gradients of inner states cannot be opened"))
        grad = None if isinstance(call, ForwardClaim) else call.request.grad_hidden
        try:
            opening = await self._opened(call.peer, asked, grad)
        except CapacityError as exc:
            # All states between the blocks take more memory than the answer did.
            return await self._elsewhere(call, asked, exc)
        try:
            return Found(verdicts=await recompute_opened(asked, call.response, opening, self._blocks), opening=opening)
        except SwarmError as exc:
            return await self._elsewhere(call, asked, exc)

    async def examine_session(self, call: StepClaim) -> tuple[list[Verdict], Witnessed | None]:
        """Checks a step of a session by two opened blocks: has the server repeat the session as one forward.

        Returns:
            The verdicts, and what shows them to a third party, if the receipts do.

        Raises:
            UncheckableError: If the session cannot be repeated as one forward: it began with a prefix, its adapters
                changed, or it is longer than what the server takes at once.
            SwarmError: If the server does not open the forward.
        """
        info, step, arrived = call.info, call.request, _arrived(call)
        kind, version = Kind(info.dtype, info.quantization), self._servers.view.version.key
        before, history = b"", call.history
        if call.sent is not None:
            use = AdapterUse(adapters=call.adapters, rows=step.adapter_rows)
            before = history_after(call.sent.opened, arrived[:-1])
            history = session_history(call.sent.opened, ((one, use) for one in arrived))
        receipt, after = check_step_receipt(call.peer, arrived[-1], call.response, before)
        check_kind(call.peer, receipt, version, kind)
        forward = repeated_forward(history, arrived[-1], version)
        num_tokens = forward.hidden.shape[0] * forward.hidden.shape[1]
        if 0 < info.max_batch_tokens < num_tokens:
            raise UncheckableError(f"{num_tokens} tokens are more than the server takes at once")
        if len(history.steps) > 1:
            await check_repeatable(forward.start, kind, self._blocks)
        asked = Asked(forward, call.adapters, kind)
        if not asked.is_as_sent:
            raise UncheckableError("the session's adapters have changed since")
        answer = travelled(call.response, "none")
        try:
            opening = await self._opened(call.peer, asked, None)
        except CapacityError as exc:
            raise UncheckableError(one_line(exc)) from exc
        try:
            verdicts = await recompute_opened(asked, ForwardResponse(hidden=answer.hidden), opening, self._blocks)
        except SwarmError as exc:
            raise UncheckableError(one_line(exc)) from exc
        if call.sent is None or not after:
            return verdicts, None
        found = Witnessed(
            opened=call.sent.opened, steps=arrived, answers=[answer], adapters=asked.adapters, opening=opening
        )
        return verdicts, found

    async def _opened(self, peer: str, asked: Asked, grad: Tensor | None) -> Opening:
        peers, nonce = self._servers.peers, secrets.token_bytes(NONCE_BYTES)
        ask = functools.partial(open_blocks, peers, peer, asked.request, grad=grad, nonce=nonce)
        return await peers.with_adapters(peer, asked.adapters, ask)

    async def _elsewhere(self, call: ForwardClaim | BackwardClaim, asked: Asked, cause: SwarmError) -> Found:
        """Compares an answer with other servers' until one of them agrees, or two differ from it."""
        differing: list[tuple[str, _Response]] = []
        verdicts: list[Verdict] = []
        for peer in self._others(call, asked):
            try:
                answer = await self._ask(peer, call, asked)
            except SwarmError as exc:
                log.debug("server %s did not help to check another: %s", peer, exc)
                continue
            verdicts = _compared(call, asked, call.response, answer)
            if not _is_wrong(verdicts):
                # Of the others, one is alone against these two.
                self._leave_out(differing, call.peer)
                return Found(verdicts=verdicts, others=(*(name for name, _ in differing), peer))
            differing.append((peer, answer))
            if len(differing) == _MAX_OTHERS:
                break
        if not differing:
            raise UncheckableError(f"{one_line(cause)}; and no other server of the same kind holds these blocks")
        (_, first), (_, last) = differing[0], differing[-1]
        if first is last or _is_wrong(_compared(call, asked, first, last)):
            # No two agree, so the other may be wrong as well.
            self._leave_out(differing[:1], call.peer)
        return Found(verdicts=verdicts, others=tuple(name for name, _ in differing))

    def _leave_out(self, differing: Sequence[tuple[str, _Response]], from_whom: str) -> None:
        for peer, _ in differing:
            self._servers.view.ban(peer, WrongAnswerError(f"server {peer} differs from {from_whom}"))

    def _others(self, call: ForwardClaim | BackwardClaim, asked: Asked) -> list[str]:
        """Returns other servers of the same kind that hold the blocks, in random order."""
        view, request, kind = self._servers.view, asked.request, asked.kind
        found = [
            entry.peer
            for entry in view.usable({call.peer})
            if entry.start <= request.start and request.end <= entry.end
        ]
        infos = {peer: info for peer in found if (info := view.said(peer)) is not None}
        same = [
            peer for peer, info in infos.items() if (info.dtype, info.quantization) == (kind.dtype, kind.quantization)
        ]
        secrets.SystemRandom().shuffle(same)
        return same

    async def _ask(
        self, peer: str, call: ForwardClaim | BackwardClaim, asked: Asked
    ) -> ForwardResponse | BackwardResponse:
        peers = self._servers.peers
        forward = msgspec.structs.replace(asked.request, keep=False, nonce=secrets.token_bytes(NONCE_BYTES))
        size = {"units": forward.hidden.shape[:2].numel(), "blocks": forward.end - forward.start}
        if isinstance(call, ForwardClaim):
            return await peers.with_adapters(
                peer, asked.adapters, lambda: peers.request(peer, "rpc_forward", forward, ForwardResponse, **size)
            )
        backward: BackwardRequest = msgspec.structs.replace(call.request, ticket=None, forward=forward)
        return await peers.with_adapters(
            peer, asked.adapters, lambda: peers.request(peer, "rpc_backward", backward, BackwardResponse, **size)
        )


def _arrived(call: StepClaim) -> list[SessionStep]:
    """Returns the steps of a session as the server got them, or if they are not all known, the last one only."""
    sent = [call.request] if call.sent is None else call.sent.steps
    # It grows while a check waits for its turn.
    end = max(index for index, step in enumerate(sent) if step is call.request) + 1
    named = call.request.adapters, call.request.adapter_rows
    if any((step.adapters, step.adapter_rows) != named for step in sent[:end]):
        raise UncheckableError("the session cannot be repeated as one forward: its adapters have changed")
    return [travelled(step, step.reply_codec) for step in sent[:end]]


def _compared(
    call: ForwardClaim | BackwardClaim,
    asked: Asked,
    one: _Response,
    other: _Response,
) -> list[Verdict]:
    if isinstance(one, ForwardResponse) and isinstance(other, ForwardResponse):
        return forward_verdicts(asked, one, [*other.hidden_states, other.hidden], is_mixture=True)
    if isinstance(call, BackwardClaim) and isinstance(one, BackwardResponse) and isinstance(other, BackwardResponse):
        hidden = torch.zeros_like(asked.request.hidden) if other.grad_hidden is None else other.grad_hidden
        return backward_verdicts(asked, one, [hidden, *other.grad_adapters, *other.grad_prefix], is_mixture=True)
    return []


def _is_wrong(verdicts: list[Verdict]) -> bool:
    return any(verdict.is_wrong for verdict in verdicts)
