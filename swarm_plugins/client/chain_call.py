"""One forward through a chain of servers and its backward, repaired span by span when servers fail.

The inputs of each span stay here as long as the graph does: a lost server costs one span's work, never the step, and
a second backward (``retain_graph=True``) gets the same gradients.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from torch import Tensor

from swarm_plugins.block_io import SpanInputs, SpanOutputs, chain_outputs
from swarm_plugins.client.answers import RefusedError, TicketLostError, check_outputs, check_tensor
from swarm_plugins.client.hedging import first_answer
from swarm_plugins.client.observer import BackwardCall, ForwardCall
from swarm_plugins.client.retries import ChainRetries
from swarm_plugins.errors import ProtocolError, SwarmError
from swarm_plugins.routing import Demand
from swarm_plugins.transport.messages import BackwardRequest, BackwardResponse, ForwardRequest, ForwardResponse, Message

if TYPE_CHECKING:
    from swarm_plugins.client.digests import AdapterPart
    from swarm_plugins.client.discovery.view import Servers

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
_SLACK_S = 0.02
"""Added to what a server's requests take as a rule: a delay shorter than that is not worth a request."""


@dataclass(frozen=True, kw_only=True)
class _SpanRun:
    """One span of a finished forward."""

    peer: str
    inputs: SpanInputs
    part: AdapterPart
    request: ForwardRequest
    response: ForwardResponse
    has_ticket: bool
    """Whether a backward may name the graph instead of sending the inputs along."""

    def without_ticket(self) -> _SpanRun:
        """Returns a run whose backward sends the inputs along."""
        return replace(self, has_ticket=False)


class ChainCall:
    """Runs blocks for one batch; raises MissingBlocksError without servers, SwarmError after too many failures."""

    def __init__(self, servers: Servers, inputs: SpanInputs, *, keep: bool) -> None:
        self.servers = servers
        self.inputs = inputs
        self.keep = keep
        """Whether a backward will follow."""
        self._runs: list[_SpanRun] = []

    async def forward(self) -> SpanOutputs:
        """Runs the blocks."""
        retries = ChainRetries(self.servers.view)
        runs = await self._forward_blocks(self.inputs, retries)
        retries.succeeded()
        if self.keep:
            self._runs = runs
        return chain_outputs([run.response for run in runs], collect_hidden=self.inputs.collect_hidden)

    async def _forward_blocks(self, inputs: SpanInputs, retries: ChainRetries) -> list[_SpanRun]:
        demand = Demand(tokens=inputs.num_tokens)
        queue = deque(await retries.chain(inputs.blocks, demand))
        hidden = inputs.hidden
        runs: list[_SpanRun] = []
        while queue:
            peer, start, end = queue.popleft()
            try:
                part = inputs.take_blocks(range(start, end), hidden)
                runs.append(await self._forward_span(peer, part, retries.excluded))
            except SwarmError as exc:
                retries.note(peer, exc)
                if isinstance(exc, RefusedError):
                    # Replan only these blocks: this server may be the only one for the rest, and serve that well.
                    queue.extendleft(reversed(await retries.chain(range(start, end), demand)))
                else:
                    queue = deque(await retries.chain(range(start, inputs.blocks.stop), demand))
                continue
            hidden = runs[-1].response.hidden
            retries.progressed()
        return runs

    async def _forward_span(self, peer: str, inputs: SpanInputs, without: Collection[str]) -> _SpanRun:
        part = self.servers.digests.part(inputs.adapters, inputs.blocks)
        request = self._request(inputs, part)
        view = self.servers.view

        async def ask(peer: str) -> tuple[str, ForwardResponse]:
            response = await self._ask(peer, part, "rpc_forward", request, ForwardResponse, len(inputs.blocks))
            check_outputs(response, inputs, peer)
            return peer, response

        async def accept(peer: str, response: ForwardResponse) -> None:
            info, adapters = view.known.infos.get(peer), part.shipped
            await view.observer.forward_done(
                ForwardCall(peer=peer, info=info, request=request, adapters=adapters, response=response)
            )

        peer, response = await self._first_answer(peer, "rpc_forward", inputs, without, ask, accept)
        return _SpanRun(
            peer=peer,
            inputs=inputs,
            part=part,
            request=request,
            response=response,
            has_ticket=response.ticket is not None,
        )

    def _request(self, inputs: SpanInputs, part: AdapterPart) -> ForwardRequest:
        return ForwardRequest(
            version=self.servers.view.version.key,
            start=inputs.blocks.start,
            end=inputs.blocks.stop,
            hidden=inputs.hidden.detach(),
            position_ids=inputs.position_ids,
            attention_mask=inputs.attention_mask,
            adapters=part.digests,
            adapter_rows=part.rows,
            dropout_seed=inputs.adapters.dropout_seed,
            prefix=tuple(tensor.detach() for tensor in inputs.prefix),
            collect_hidden=inputs.collect_hidden,
            collect_router=inputs.collect_router,
            keep=self.keep,
            reply_codec=self.servers.peers.config.codec,
            nonce=self.servers.view.observer.nonce(),
        )

    async def _first_answer(
        self,
        peer: str,
        rpc: str,
        inputs: SpanInputs,
        without: Collection[str],
        ask: Callable[[str], Coroutine[Any, Any, tuple[str, M]]],
        accept: Callable[[str, M], Awaitable[None]],
    ) -> tuple[str, M]:
        """Asks a server, and a replica while it takes longer than it does as a rule; returns who answered what."""
        view = self.servers.view
        winner, answer = await self._race(peer, rpc, inputs, without, ask)
        try:
            await accept(winner, answer)
        except SwarmError as exc:
            if winner == peer:
                raise
            # The server itself is not to blame.
            view.ban(winner, exc)
            winner, answer = await ask(peer)
            await accept(winner, answer)
        view.bans.forgive(winner)
        return winner, answer

    async def _race(
        self,
        peer: str,
        rpc: str,
        inputs: SpanInputs,
        without: Collection[str],
        ask: Callable[[str], Coroutine[Any, Any, tuple[str, M]]],
    ) -> tuple[str, M]:
        view, paces, hedges = self.servers.view, self.servers.peers.paces, self.servers.hedges
        size, tokens = len(inputs.blocks), inputs.num_tokens
        usual_s = paces.usual_s(peer, rpc, blocks=size, tokens=tokens)
        hedges.earn()
        if usual_s is None:
            return await ask(peer)

        def ask_replica() -> Coroutine[Any, Any, tuple[str, M]] | None:
            other = view.replica(inputs.blocks, Demand(tokens=tokens), without={peer, *without})
            if other is None or not hedges.take():
                return None
            log.info("server %s has not answered for %.2f s: %s is asked too", peer, usual_s, other)
            return ask(other)

        started = time.perf_counter()
        winner, answer = await first_answer(ask(peer), ask_replica, late_s=usual_s + _SLACK_S)
        if winner != peer:
            # It took longer than this, and nobody will know how much.
            paces.observe(peer, rpc, blocks=size, tokens=tokens, seconds=time.perf_counter() - started)
        return winner, answer

    async def _ask(self, peer: str, part: AdapterPart, rpc: str, request: Message, kind: type[M], blocks: int) -> M:
        peers = self.servers.peers
        return await peers.with_adapters(
            peer, part.shipped, lambda: peers.request(peer, rpc, request, kind, blocks=blocks)
        )

    async def backward(self, grads: SpanOutputs, *, needs_hidden: bool, needs: Sequence[bool]) -> list[Tensor | None]:
        """Returns the gradients of hidden states, adapter tensors and prefix, in this order.

        ``grads`` holds the outputs' gradients; ``needs`` says for each tensor of adapters and prefix if its gradient
        is wanted.
        """
        num_adapter = len(self.inputs.adapters.tensors)
        collected = _Collected(
            adapters=[None] * num_adapter,
            prefix=[None] * len(self.inputs.prefix),
            needs_adapters=any(needs[:num_adapter]),
            needs_prefix=any(needs[num_adapter:]),
        )
        grad: Tensor | None = grads.hidden
        retries = ChainRetries(self.servers.view)
        lowest = self._lowest_block_with_gradient(needs_hidden, needs)
        pending = list(self._runs)
        while pending and grad is not None:
            run = pending.pop()
            blocks = run.inputs.blocks
            if blocks.stop <= lowest:
                break
            try:
                without, needs_input = retries.excluded, blocks.start > lowest
                answer = await self._backward_span(run, grad, grads, collected, without, needs_input=needs_input)
            except SwarmError as exc:
                if isinstance(exc, TicketLostError) and run.has_ticket:
                    # The server is fine, only the graph is gone: send the inputs again.
                    pending.append(run.without_ticket())
                else:
                    retries.note(run.peer, exc)
                    pending.extend(await self._forward_blocks(run.inputs, retries))
                continue
            retries.progressed()
            grad = answer.grad_hidden
            before = self._index(blocks.start)
            if self.inputs.collect_hidden and before > 0 and grad is not None:
                grad = grad + grads.hidden_states[before - 1]
        retries.succeeded()
        # A kept graph serves one backward; another one starts from the inputs.
        self._runs = [run.without_ticket() for run in self._runs]
        return [grad if needs_hidden else None, *collected.adapters, *collected.prefix]

    def _index(self, block: int) -> int:
        return block - self.inputs.blocks.start

    def _lowest_block_with_gradient(self, needs_hidden: bool, needs: Sequence[bool]) -> int:
        """Returns the block at which the backward can stop: below it nothing needs a gradient."""
        if needs_hidden or any(needs[len(self.inputs.adapters.tensors) :]):
            return -1
        lowest = self._runs[-1].inputs.blocks.stop if self._runs else 0
        index = 0
        for adapter in self.inputs.adapters.adapters:
            for module in adapter.spec.modules:
                if any(needs[index : index + len(module.shapes)]):
                    lowest = min(lowest, module.block)
                index += len(module.shapes)
        return lowest

    async def _backward_span(
        self,
        run: _SpanRun,
        grad: Tensor,
        grads: SpanOutputs,
        collected: _Collected,
        without: Collection[str],
        *,
        needs_input: bool,
    ) -> BackwardResponse:
        view, blocks = self.servers.view, run.inputs.blocks
        first, last = self._index(blocks.start), self._index(blocks.stop)
        routers = zip(grads.router_blocks, grads.router_logits, strict=True)
        forward = msgspec.structs.replace(run.request, keep=False)
        request = BackwardRequest(
            ticket=run.response.ticket if run.has_ticket else None,
            forward=None if run.has_ticket else forward,
            grad_hidden=grad.contiguous(),
            grad_hidden_states=grads.hidden_states[first : last - 1] if self.inputs.collect_hidden else (),
            grad_router_logits=tuple(gradient for block, gradient in routers if block in blocks),
            needs_hidden=needs_input,
            needs_adapters=collected.needs_adapters and bool(run.part.indices),
            needs_prefix=collected.needs_prefix,
            reply_codec=self.servers.peers.config.codec,
            nonce=view.observer.nonce(),
        )

        def sent_to(peer: str) -> BackwardRequest:
            # The graph is kept by the server of the forward; others run it again, with the same dropout.
            return request if peer == run.peer else msgspec.structs.replace(request, ticket=None, forward=forward)

        async def ask(peer: str) -> tuple[str, BackwardResponse]:
            response = await self._ask(peer, run.part, "rpc_backward", sent_to(peer), BackwardResponse, len(blocks))
            _check_gradients(response, request, replace(run, peer=peer))
            return peer, response

        async def accept(peer: str, response: BackwardResponse) -> None:
            await view.observer.backward_done(
                BackwardCall(
                    peer=peer,
                    info=view.known.infos.get(peer),
                    forward=run.request,
                    outputs=run.response,
                    adapters=run.part.shipped,
                    request=sent_to(peer),
                    response=response,
                )
            )

        _, answer = await self._first_answer(run.peer, "rpc_backward", run.inputs, without, ask, accept)
        if request.needs_adapters:
            for index, value in zip(run.part.indices, answer.grad_adapters, strict=True):
                collected.adapters[index] = value
        if request.needs_prefix:
            collected.prefix[2 * first : 2 * last] = answer.grad_prefix
        return answer


def _check_gradients(answer: BackwardResponse, request: BackwardRequest, run: _SpanRun) -> None:
    if request.needs_hidden:
        check_tensor(answer.grad_hidden, run.inputs.hidden, run.peer, "the gradient of the hidden states")
    adapters = [tensor for adapter in run.part.shipped for tensor in adapter.tensors]
    for name, got, want in (
        ("adapter", answer.grad_adapters, adapters if request.needs_adapters else ()),
        ("prefix", answer.grad_prefix, run.inputs.prefix if request.needs_prefix else ()),
    ):
        if len(got) != len(want):
            raise ProtocolError(f"server {run.peer} returned {len(got)} {name} gradients, expected {len(want)}")
        for value, reference in zip(got, want, strict=True):
            check_tensor(value, reference, run.peer, f"an {name} gradient")


@dataclass(kw_only=True)
class _Collected:
    adapters: list[Tensor | None]
    prefix: list[Tensor | None]
    needs_adapters: bool
    needs_prefix: bool
