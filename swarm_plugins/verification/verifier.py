"""Spot checks of servers' answers, as Petals proposes them (Borzunov et al. 2023, section 4).

A checked call is computed again here, from the input that the server got. The first calls of a server are checked
before their answers are used, later ones by chance and in the background. A server with a wrong answer is quarantined,
and the call goes to another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from torch import Tensor

from swarm_plugins.block_io import AdapterUse, LoadedAdapter, SpanInputs
from swarm_plugins.client.observer import BackwardCall, ForwardCall, WrongAnswerError
from swarm_plugins.errors import SwarmError
from swarm_plugins.transport.messages import ForwardRequest, ServerInfo
from swarm_plugins.verification.local_blocks import Kind, LocalBlocks
from swarm_plugins.verification.quarantine import Quarantine
from swarm_plugins.verification.rates import CheckRates
from swarm_plugins.verification.scores import (
    Verdict,
    coarsest,
    compare_gradients,
    compare_outputs,
    compare_parameters,
)

log = logging.getLogger(__name__)

Recompute = Callable[[], Awaitable[list[Verdict]]]
"""Computes again what a call asked for, and compares."""
_MAX_WAITING = 4
"""Checks in the background; a call that is to be checked beyond these waits for its check."""


class Verifier:
    """Observes the calls of one client to one model's servers; see `CallObserver`.

    Args:
        blocks: Computes what servers should have computed.
        quarantine: Where caught servers are listed.
        version: Model version, for the list.
        rates: Which calls are checked.
    """

    def __init__(
        self, blocks: LocalBlocks, quarantine: Quarantine, *, version: str, rates: CheckRates | None = None
    ) -> None:
        self.quarantine = quarantine
        self.version = version
        self.rates = rates or CheckRates()
        self.checked: Counter[str] = Counter()
        """Checks that came to a result, by peer."""
        self._blocks = blocks
        self._running: set[asyncio.Task[None]] = set()

    def is_excluded(self, peer: str) -> bool:
        """Returns whether a peer is in quarantine."""
        return peer in self.quarantine

    async def forward_done(self, call: ForwardCall) -> None:
        """Checks a forward, or not; see `CallObserver`."""
        await self._examine(call.peer, call.info, "forward", lambda: self._forward_check(call))

    async def backward_done(self, call: BackwardCall) -> None:
        """Checks a backward, or not; see `CallObserver`."""
        await self._examine(call.peer, call.info, "backward", lambda: self._backward_check(call))

    async def close(self) -> None:
        """Ends the checks in the background. Idempotent."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _examine(
        self,
        peer: str,
        info: ServerInfo | None,
        what: str,
        prepare: Callable[[], Recompute],
    ) -> None:
        if info is None:
            return
        server = (peer, what, info.start, info.end, info.dtype, info.quantization)
        when = self.rates.when(server)
        if when == "never":
            return
        # Prepared now: what trains is changed in place by the next optimizer step.
        check = self._check(server, what, prepare())
        if when == "before" or len(self._running) >= _MAX_WAITING:
            await check
            return
        task = asyncio.create_task(self._in_background(check), name=f"check {what} of {peer}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _in_background(self, check: Awaitable[None]) -> None:
        try:
            await check
        except WrongAnswerError as exc:
            log.warning("an answer that has already been used was wrong: %s", exc)

    async def _check(self, server: tuple[object, ...], what: str, run: Recompute) -> None:
        peer = str(server[0])
        try:
            verdicts = await run()
        except SwarmError as exc:
            log.warning("the %s of server %s could not be checked: %s", what, peer, exc)
            return
        self.checked[peer] += 1
        wrong = next((verdict for verdict in verdicts if verdict.is_wrong), None)
        if wrong is None:
            self.rates.passed(server)
            return
        self.rates.doubt(server)
        reason = f"wrong {what} of blocks {server[2]}:{server[3]}: {wrong}"
        self.quarantine.add(peer, model=self.version, reason=reason)
        log.warning("server %s is quarantined for a day: %s", peer, reason)
        raise WrongAnswerError(f"server {peer} gave a wrong answer and is quarantined: {reason}")

    def _forward_check(self, call: ForwardCall) -> Recompute:
        inputs, kind, precision = _prepared(call.request, call.adapters, call.info)
        output = call.response.hidden.clone()

        async def run() -> list[Verdict]:
            expected = await self._blocks.outputs(inputs, kind)
            is_mixture = self._blocks.has_experts(inputs.blocks, kind)
            return [
                compare_outputs(
                    inputs.hidden, output, expected, precision, mask=inputs.attention_mask, is_mixture=is_mixture
                )
            ]

        return run

    def _backward_check(self, call: BackwardCall) -> Recompute:
        inputs, kind, precision = _prepared(call.forward, call.adapters, call.info)
        request, response = call.request, call.response
        inputs = replace(
            inputs,
            hidden=inputs.hidden.to(kind.torch_dtype).requires_grad_(),
            prefix=tuple(tensor.requires_grad_() for tensor in inputs.prefix),
            adapters=inputs.adapters.map(Tensor.requires_grad_),
        )
        wanted = [
            *([inputs.hidden] if request.needs_hidden else []),
            *(inputs.adapters.tensors if request.needs_adapters else ()),
            *(inputs.prefix if request.needs_prefix else ()),
        ]

        async def run() -> list[Verdict]:
            if request.grad_hidden_states or request.grad_router_logits or not wanted:
                return []
            expected = await self._blocks.gradients(inputs, kind, request.grad_hidden, wanted)
            is_mixture = self._blocks.has_experts(inputs.blocks, kind)
            verdicts = []
            if request.needs_hidden and response.grad_hidden is not None:
                mask, here = inputs.attention_mask, expected.pop(0)
                verdicts.append(
                    compare_gradients(response.grad_hidden, here, precision, mask=mask, is_mixture=is_mixture)
                )
            if expected:
                found = (*response.grad_adapters, *response.grad_prefix)
                verdicts.append(compare_parameters(found, expected, precision))
            return verdicts

        return run


def _prepared(
    request: ForwardRequest, adapters: Sequence[LoadedAdapter], info: ServerInfo | None
) -> tuple[SpanInputs, Kind, str]:
    """Returns a request's inputs with copies of the adapters, the server's kind, and the coarsest type on the way."""
    kind = Kind(info.dtype, info.quantization) if info is not None else Kind("float32", "none")
    copies = tuple(adapter.map(lambda tensor: tensor.detach().to("cpu", copy=True)) for adapter in adapters)
    inputs = SpanInputs(
        blocks=range(request.start, request.end),
        # A copy, like the rest: the caller may change its tensors before a later check.
        hidden=request.hidden.clone(),
        position_ids=request.position_ids,
        attention_mask=request.attention_mask,
        adapters=AdapterUse(adapters=copies, rows=request.adapter_rows, dropout_seed=request.dropout_seed),
        prefix=tuple(tensor.to(kind.torch_dtype) for tensor in request.prefix),
    )
    wire = str(request.hidden.dtype).removeprefix("torch.")
    return inputs, kind, coarsest([kind.dtype, wire, request.reply_codec])
