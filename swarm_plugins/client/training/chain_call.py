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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from torch import Tensor

from swarm_plugins.block_io import SpanInputs, SpanOutputs, chain_outputs
from swarm_plugins.client.answers import OverloadedError, RefusedError, TicketLostError, check_gradients, check_outputs
from swarm_plugins.client.digests import CallAdapters
from swarm_plugins.client.hedging import first_answer
from swarm_plugins.client.observer import BackwardCall, ForwardCall
from swarm_plugins.client.retries import ChainRetries
from swarm_plugins.errors import CapacityError, SwarmError, TransportError
from swarm_plugins.routing import Demand, SpanChoice
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


class _Attempt(NamedTuple):
    """A request of a call that several requests may fail together."""

    retries: ChainRetries
    since: int
    """The moment at which its server was chosen."""

    def check(self, peer: str) -> None:
        """Raises TransportError if another request of the call has found out that a server fails."""
        if self.retries.has_failed(peer, self.since):
            raise TransportError(f"server {peer} has failed meanwhile")


class ChainCall:
    """Runs blocks for one chunk of a batch; chunks of a batch share their retries and adapters.

    Args:
        servers: The swarm.
        inputs: The chunk.
        keep: Whether a backward will follow.
        adapters: The batch's.
    """

    def __init__(self, servers: Servers, inputs: SpanInputs, *, keep: bool, adapters: CallAdapters) -> None:
        self.servers = servers
        self.inputs = inputs
        self.keep = keep
        self._adapters = adapters
        self._runs: list[_SpanRun] = []

    async def forward(self, retries: ChainRetries, chain: Sequence[SpanChoice]) -> SpanOutputs:
        """Runs the blocks on a chain, or on other servers if these fail.

        Raises:
            MissingBlocksError: If no server is left for some block.
            SwarmError: After too many failures.
        """
        runs = await self._forward_blocks(self.inputs, retries, chain)
        if self.keep:
            self._runs = runs
        return chain_outputs([run.response for run in runs], collect_hidden=self.inputs.collect_hidden)

    @property
    def unkept(self) -> list[str]:
        """Servers that do not keep the graph for the backward to come."""
        return [run.peer for run in self._runs if not run.has_ticket]

    async def _forward_blocks(
        self, inputs: SpanInputs, retries: ChainRetries, chain: Sequence[SpanChoice] | None = None
    ) -> list[_SpanRun]:
        demand, last = Demand(tokens=inputs.num_tokens), inputs.blocks.stop
        since = retries.moment if chain is None else 0
        queue = deque(await retries.chain(inputs.blocks, demand) if chain is None else chain)
        hidden = inputs.hidden
        runs: list[_SpanRun] = []
        while queue:
            peer, start, end = queue.popleft()
            try:
                part = inputs.take_blocks(range(start, end), hidden)
                runs.append(await self._forward_span(peer, part, _Attempt(retries, since)))
            except SwarmError as exc:
                retries.note(peer, exc, since)
                since = retries.moment
                if isinstance(exc, RefusedError):
                    # Replan only these blocks: this server may be the only one for the rest, and serve that well.
                    queue.extendleft(reversed(await retries.chain(range(start, end), demand)))
                else:
                    queue = deque(await retries.chain(range(start, last), demand))
                continue
            hidden = runs[-1].response.hidden
            retries.progressed()
        return runs

    async def _forward_span(self, peer: str, inputs: SpanInputs, attempt: _Attempt) -> _SpanRun:
        part = self._adapters.part(inputs.blocks)
        request = self._request(inputs, part)
        view = self.servers.view
        sent: dict[str, ForwardRequest] = {}

        async def ask(peer: str) -> tuple[str, ForwardResponse]:
            sent[peer] = msgspec.structs.replace(request, reply_codec=view.codecs.between(inputs.hidden, peer))
            response = await self._ask(peer, part, "rpc_forward", sent[peer], ForwardResponse, inputs, attempt)
            check_outputs(response, inputs, peer)
            return peer, response

        async def accept(peer: str, response: ForwardResponse) -> None:
            info, adapters = view.known.infos.get(peer), part.shipped
            await view.observer.forward_done(
                ForwardCall(peer=peer, info=info, request=sent[peer], adapters=adapters, response=response)
            )

        without = attempt.retries.excluded
        peer, response = await self._first_answer(peer, "rpc_forward", inputs, without, ask, accept)
        has_ticket = response.ticket is not None
        if self.keep and not has_ticket:
            self.servers.note_unkept(peer, inputs.num_tokens)
        return _SpanRun(
            peer=peer, inputs=inputs, part=part, request=sent[peer], response=response, has_ticket=has_ticket
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
            adapter_rows=inputs.adapters.rows,
            dropout_seed=inputs.adapters.dropout_seed,
            prefix=tuple(tensor.detach() for tensor in inputs.prefix),
            collect_hidden=inputs.collect_hidden,
            collect_router=inputs.collect_router,
            keep=self.keep,
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
        with self.servers.peers.queues.asking(peer, tokens) as before:
            if usual_s is None:
                return await ask(peer)
            # What was seen is without a queue; those before this one in the queue take as long for each token.
            turns = 1.0 + before / tokens
            late_s = turns * usual_s + _SLACK_S

            def ask_replica() -> Coroutine[Any, Any, tuple[str, M]] | None:
                other = view.replica(inputs.blocks, Demand(tokens=tokens), without={peer, *without})
                if other is None or not hedges.take():
                    return None
                log.info("server %s has not answered for %.2f s: %s is asked too", peer, late_s, other)
                return ask(other)

            started = time.perf_counter()
            winner, answer = await first_answer(ask(peer), ask_replica, late_s=late_s)
        if winner != peer:
            # It took longer than this, and nobody will know how much.
            paces.observe(peer, rpc, blocks=size, tokens=tokens, seconds=(time.perf_counter() - started) / turns)
        return winner, answer

    async def _ask(
        self,
        peer: str,
        part: AdapterPart,
        rpc: str,
        request: Message,
        kind: type[M],
        inputs: SpanInputs,
        attempt: _Attempt,
    ) -> M:
        peers, blocks = self.servers.peers, len(inputs.blocks)
        room = self.servers.view.known.max_batch_tokens(peer)
        while True:
            async with peers.queues.turn(peer, inputs.num_tokens, room=room):
                attempt.check(peer)
                try:
                    return await peers.with_adapters(
                        peer, part.shipped, lambda: peers.request(peer, rpc, request, kind, blocks=blocks)
                    )
                except (OverloadedError, CapacityError) as exc:
                    refusal = exc
            if not peers.queues.refused(peer):
                raise refusal

    async def backward(
        self,
        grads: SpanOutputs,
        *,
        needs_hidden: bool,
        needs: Sequence[bool],
        retries: ChainRetries,
    ) -> list[Tensor | None]:
        """Returns the gradients of hidden states, adapter tensors and prefix, in this order.

        Args:
            grads: The gradients of the outputs.
            needs_hidden: Whether the gradient of hidden states is wanted.
            needs: The same for each tensor of adapters and prefix.
            retries: The batch's.

        Raises:
            MissingBlocksError: If no server is left for some block.
            SwarmError: After too many failures.
        """
        num_adapter = len(self.inputs.adapters.tensors)
        collected = _Collected(
            adapters=[None] * num_adapter,
            prefix=[None] * len(self.inputs.prefix),
            needs_adapters=any(needs[:num_adapter]),
            needs_prefix=any(needs[num_adapter:]),
        )
        grad: Tensor | None = grads.hidden
        lowest = self._lowest_block_with_gradient(needs_hidden, needs)
        pending = [(run, 0) for run in self._runs]
        while pending and grad is not None:
            run, since = pending.pop()
            blocks = run.inputs.blocks
            if blocks.stop <= lowest:
                break
            try:
                attempt, needs_input = _Attempt(retries, since), blocks.start > lowest
                answer = await self._backward_span(run, grad, grads, collected, attempt, needs_input=needs_input)
            except SwarmError as exc:
                if isinstance(exc, TicketLostError) and run.has_ticket:
                    # The server is fine, only the graph is gone: send the inputs again.
                    self.servers.note_unkept(run.peer, run.inputs.num_tokens)
                    pending.append((run.without_ticket(), since))
                else:
                    retries.note(run.peer, exc, since)
                    since = retries.moment
                    pending.extend((again, since) for again in await self._forward_blocks(run.inputs, retries))
                continue
            retries.progressed()
            grad = answer.grad_hidden
            before = self._index(blocks.start)
            if self.inputs.collect_hidden and before > 0 and grad is not None:
                grad = grad + grads.hidden_states[before - 1]
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
        attempt: _Attempt,
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
            reply_codec=run.request.reply_codec,
            nonce=view.observer.nonce(),
        )

        def sent_to(peer: str) -> BackwardRequest:
            if peer == run.peer:
                return request
            # The graph is kept by the server of the forward; others run it again, with the same dropout.
            codec = view.codecs.between(grad, peer)
            again = msgspec.structs.replace(forward, reply_codec=codec)
            return msgspec.structs.replace(request, ticket=None, forward=again, reply_codec=codec)

        async def ask(peer: str) -> tuple[str, BackwardResponse]:
            message = sent_to(peer)
            response = await self._ask(peer, run.part, "rpc_backward", message, BackwardResponse, run.inputs, attempt)
            adapters = [tensor for adapter in run.part.shipped for tensor in adapter.tensors]
            check_gradients(response, request, run.inputs, adapters, peer)
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

        without = attempt.retries.excluded
        _, answer = await self._first_answer(run.peer, "rpc_backward", run.inputs, without, ask, accept)
        if request.needs_adapters:
            for index, value in zip(run.part.indices, answer.grad_adapters, strict=True):
                collected.adapters[index] = value
        if request.needs_prefix:
            collected.prefix[2 * first : 2 * last] = answer.grad_prefix
        return answer


@dataclass(kw_only=True)
class _Collected:
    adapters: list[Tensor | None]
    prefix: list[Tensor | None]
    needs_adapters: bool
    needs_prefix: bool
