"""Spot checks of servers' answers, as Petals proposes them (Borzunov et al. 2023, section 4).

A checked call is computed again here, from the input that the server got. The first calls of a server are checked
before their answers are used, later ones by chance and in the background. A server with a wrong answer is quarantined,
and the call goes to another one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from swarm_plugins.checkpoint.range_cache import default_cache
from swarm_plugins.client.observer import BackwardCall, CallObserver, ForwardCall, NoObserver, WrongAnswerError
from swarm_plugins.errors import ProtocolError, SwarmError, one_line
from swarm_plugins.transport.messages import Codec, Message
from swarm_plugins.transport.receipts import check_receipt
from swarm_plugins.transport.wire import decode, encode
from swarm_plugins.verification.evidence import evidence_of, save_evidence
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks
from swarm_plugins.verification.quarantine import Quarantine, user_quarantine
from swarm_plugins.verification.rates import CheckRates
from swarm_plugins.verification.recompute import Asked, recompute_backward, recompute_forward
from swarm_plugins.verification.scores import Verdict

if TYPE_CHECKING:
    from swarm_plugins.checkpoint import Checkpoint
    from swarm_plugins.client.view import Servers

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
_NONCE_BYTES = 16
_MAX_WAITING = 4
"""Checks in the background; a call that is to be checked beyond these waits for its check."""


class Verifier:
    """Observes the calls of one client to one model's servers; see `CallObserver`.

    Args:
        blocks: Computes what servers should have computed.
        quarantine: Where caught servers are listed.
        evidence: Folder for what they were caught with.
        version: Model version, for both.
        rates: Which calls are checked.
    """

    def __init__(
        self,
        blocks: LocalBlocks,
        quarantine: Quarantine,
        *,
        evidence: Path,
        version: str,
        rates: CheckRates | None = None,
    ) -> None:
        self.quarantine = quarantine
        self.evidence = evidence
        self.version = version
        self.rates = rates or CheckRates()
        self.checked: Counter[str] = Counter()
        """Checks that came to a result, by peer."""
        self._blocks = blocks
        self._running: set[asyncio.Task[None]] = set()

    def is_excluded(self, peer: str) -> bool:
        """Returns whether a peer is in quarantine."""
        return peer in self.quarantine

    def nonce(self) -> bytes:
        """Returns random bytes: every answer needs a receipt, as servers must not know which ones are checked."""
        return secrets.token_bytes(_NONCE_BYTES)

    async def forward_done(self, call: ForwardCall) -> None:
        """Checks a forward, or not; see `CallObserver`."""
        await self._examine(call, "forward")

    async def backward_done(self, call: BackwardCall) -> None:
        """Checks a backward, or not; see `CallObserver`."""
        await self._examine(call, "backward")

    async def close(self) -> None:
        """Ends the checks in the background. Idempotent."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _examine(self, call: ForwardCall | BackwardCall, what: str) -> None:
        info = call.info
        if info is None:
            return
        server = (call.peer, what, info.start, info.end, info.dtype, info.quantization)
        when = self.rates.when(server)
        if when == "never":
            return
        # Copied now: what trains is changed in place by the next optimizer step.
        call = _as_sent(call)
        forward = call.request if isinstance(call, ForwardCall) else call.forward
        asked = Asked(forward, call.adapters, Kind(info.dtype, info.quantization))
        check = self._check(server, what, call, asked)
        if when == "before" or len(self._running) >= _MAX_WAITING:
            await check
        else:
            self._start(check, f"check {what} of {call.peer}")

    def _start(self, check: Coroutine[Any, Any, None], name: str) -> None:
        async def run() -> None:
            try:
                await check
            except SwarmError as exc:
                log.warning("an answer that has already been used was wrong: %s", exc)

        task = asyncio.create_task(run(), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _check(
        self, server: tuple[object, ...], what: str, call: ForwardCall | BackwardCall, asked: Asked
    ) -> None:
        try:
            _check_receipts(call, asked)
        except ProtocolError:
            self.rates.doubt(server)
            raise
        try:
            verdicts = await self._recompute(call, asked)
        except SwarmError as exc:
            log.warning("the %s of server %s could not be checked: %s", what, call.peer, exc)
            return
        self.checked[call.peer] += 1
        wrong = next((verdict for verdict in verdicts if verdict.is_wrong), None)
        if wrong is None:
            self.rates.passed(server)
            return
        self.rates.doubt(server)
        reason = f"wrong {what} of blocks {asked.request.start}:{asked.request.end}: {wrong}"
        self._quarantine(call, asked, reason)
        raise WrongAnswerError(f"server {call.peer} gave a wrong answer and is quarantined: {reason}")

    async def _recompute(self, call: ForwardCall | BackwardCall, asked: Asked) -> list[Verdict]:
        if isinstance(call, ForwardCall):
            return await recompute_forward(asked, call.response, self._blocks)
        return await recompute_backward(asked, call.request, call.response, self._blocks)

    def _quarantine(self, call: ForwardCall | BackwardCall, asked: Asked, reason: str) -> None:
        file = ""
        try:
            file = str(
                save_evidence(self.evidence, evidence_of(call, asked, model=self.version, reason=reason)).resolve()
            )
        except OSError as exc:
            log.warning("cannot save the evidence against %s to %s: %s", call.peer, self.evidence, one_line(exc))
        self.quarantine.add(call.peer, model=self.version, reason=reason, evidence=file)
        log.warning("server %s is quarantined for a day: %s", call.peer, reason)


def make_observer(servers: Servers, open_checkpoint: Callable[[], Checkpoint]) -> CallObserver:
    """Returns the observer that a client's settings ask for."""
    config = servers.view.config
    if config.verify == "off" or config.allowed_peers is not None:
        return NoObserver()
    blocks = LocalBlocks(open_checkpoint, limit_bytes=config.verify_bytes)
    evidence = default_cache() / "evidence"
    return Verifier(blocks, user_quarantine(), evidence=evidence, version=str(servers.view.version))


def _check_receipts(call: ForwardCall | BackwardCall, asked: Asked) -> None:
    """Raises ProtocolError unless the server has signed its answer, and what it says about itself."""
    if isinstance(call, ForwardCall):
        receipt = check_receipt(call.peer, call.request, call.response)
    else:
        check_receipt(call.peer, call.forward, call.outputs)
        receipt = check_receipt(call.peer, call.request, call.response)
    signed = (receipt.version, receipt.dtype, receipt.quantization)
    said = (asked.request.version, asked.kind.dtype, asked.kind.quantization)
    if signed != said:
        raise ProtocolError(f"server {call.peer} signed for {signed}, it is asked for and announces {said}")


def _as_sent(call: ForwardCall | BackwardCall) -> ForwardCall | BackwardCall:
    """Returns a call with copies of its messages, as they were on the other end of the wire."""
    if isinstance(call, ForwardCall):
        codec = call.request.reply_codec
        return replace(call, request=_travelled(call.request, codec), response=_travelled(call.response, "none"))
    codec = call.request.reply_codec
    return replace(
        call,
        forward=_travelled(call.forward, codec),
        outputs=_travelled(call.outputs, "none"),
        request=_travelled(call.request, codec),
        response=_travelled(call.response, "none"),
    )


def _travelled(message: M, codec: Codec) -> M:
    return cast(M, decode(b"".join(encode(message, codec=codec))))
