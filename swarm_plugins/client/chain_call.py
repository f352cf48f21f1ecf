"""One forward through a chain of servers and its backward, repaired span by span when servers fail.

Everything a span needs to be run again (its input) stays here for as long as the graph does, so a lost server costs
one span's work, never the step, and a second backward (``retain_graph=True``) gets the same gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from swarm_plugins.client.adapters import AdapterPart, AdapterSelection, DigestCache
from swarm_plugins.client.checks import check_outputs, check_tensor
from swarm_plugins.client.directory import SwarmView
from swarm_plugins.client.failures import RefusedError, TicketLostError
from swarm_plugins.client.peers import Peers
from swarm_plugins.client.retries import Retries
from swarm_plugins.errors import ProtocolError, SwarmError
from swarm_plugins.routing import Demand, SpanChoice
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    ForwardRequest,
    ForwardResponse,
)

__all__ = ["BlockInputs", "BlockOutputs", "ChainCall"]


@dataclass(frozen=True, kw_only=True)
class BlockInputs:
    """What a model's blocks get. ``B`` batch, ``S`` tokens, ``P`` prefix, ``D`` width."""

    hidden: Tensor
    """``[B, S, D]``."""
    position_ids: Tensor | None = None
    """``[B or 1, S]``."""
    attention_mask: Tensor | None = None
    """``[B, P + S]`` (with a session: all cached and new tokens), bool."""
    adapters: AdapterSelection = field(default_factory=AdapterSelection)
    prefix: tuple[Tensor, ...] = ()
    """K then V for each block."""
    collect_hidden: bool = False
    collect_router: bool = False


@dataclass(kw_only=True)
class BlockOutputs:
    """What a model's blocks give."""

    hidden: Tensor
    hidden_states: list[Tensor] = field(default_factory=list)
    """Outputs of all blocks but the last, if asked for."""
    router_logits: list[Tensor] = field(default_factory=list)
    router_blocks: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class _SpanRun:
    """One span of a finished forward."""

    span: SpanChoice
    hidden: Tensor
    part: AdapterPart
    response: ForwardResponse


class ChainCall:
    """Runs all blocks for one batch.

    Args:
        peers: Sends the requests.
        view: Plans the chain.
        digests: Names the adapters.
        inputs: What the blocks get.
        keep: Whether a backward will follow.
    """

    def __init__(self, peers: Peers, view: SwarmView, digests: DigestCache, inputs: BlockInputs, *, keep: bool) -> None:
        self.peers = peers
        self.view = view
        self.digests = digests
        self.inputs = inputs
        self.keep = keep
        self._first = 0
        self._runs: list[_SpanRun] = []

    async def forward(self, blocks: range) -> BlockOutputs:
        """Runs the blocks.

        Raises:
            MissingBlocksError: If no living server holds some block.
            SwarmError: If a server refuses the request, or too many servers failed.
        """
        self._first = blocks.start
        retries = Retries(self.view, self.peers.config.max_retries)
        runs = await self._forward_blocks(blocks, self.inputs.hidden, retries)
        retries.succeeded()
        if self.keep:
            self._runs = runs
        outputs = BlockOutputs(hidden=runs[-1].response.hidden)
        for run in runs:
            outputs.hidden_states.extend(run.response.hidden_states)
            if self.inputs.collect_hidden and run is not runs[-1]:
                outputs.hidden_states.append(run.response.hidden)
            outputs.router_logits.extend(run.response.router_logits)
            outputs.router_blocks.extend(run.response.router_blocks)
        return outputs

    async def _forward_blocks(self, blocks: range, hidden: Tensor, retries: Retries) -> list[_SpanRun]:
        demand = Demand(tokens=hidden.shape[0] * hidden.shape[1])
        queue = deque(await retries.chain(blocks, demand))
        runs: list[_SpanRun] = []
        while queue:
            span = queue.popleft()
            try:
                runs.append(await self._forward_span(span, hidden))
            except SwarmError as exc:
                retries.note(span.peer, exc)
                if isinstance(exc, RefusedError):
                    # Only these blocks: nobody else may hold the others, and the server may do well with them.
                    queue.extendleft(reversed(await retries.chain(range(span.start, span.end), demand)))
                else:
                    queue = deque(await retries.chain(range(span.start, blocks.stop), demand))
                continue
            hidden = runs[-1].response.hidden
        return runs

    def _request(self, span: SpanChoice, hidden: Tensor, part: AdapterPart, *, keep: bool) -> ForwardRequest:
        inputs = self.inputs
        return ForwardRequest(
            version=self.view.version.key,
            start=span.start,
            end=span.end,
            hidden=hidden.detach(),
            position_ids=inputs.position_ids,
            attention_mask=inputs.attention_mask,
            adapters=part.digests,
            adapter_rows=part.rows,
            dropout_seed=inputs.adapters.dropout_seed,
            prefix=tuple(tensor.detach() for tensor in self._prefix_of(span)),
            collect_hidden=inputs.collect_hidden,
            collect_router=inputs.collect_router,
            keep=keep,
            reply_codec=self.peers.config.codec,
        )

    def _prefix_of(self, span: SpanChoice) -> tuple[Tensor, ...]:
        return self.inputs.prefix[self._prefix_slice(span)]

    def _prefix_slice(self, span: SpanChoice) -> slice:
        return slice(2 * (span.start - self._first), 2 * (span.end - self._first))

    async def _forward_span(self, span: SpanChoice, hidden: Tensor) -> _SpanRun:
        part = self.digests.part(self.inputs.adapters, range(span.start, span.end))
        request = self._request(span, hidden, part, keep=self.keep)
        response = await self.peers.request_with_adapters(
            span.peer, "rpc_forward", request, ForwardResponse, part.shipped
        )
        check_outputs(response, span, hidden, collect_hidden=self.inputs.collect_hidden)
        self.view.bans.forgive(span.peer)
        return _SpanRun(span=span, hidden=hidden, part=part, response=response)

    async def backward(self, grads: BlockOutputs, *, needs_hidden: bool, needs: Sequence[bool]) -> list[Tensor | None]:
        """Returns the gradients of the hidden states, of all adapter tensors and of the prefix, in this order.

        Args:
            grads: Gradients of the outputs, each in its place.
            needs_hidden: Whether the gradient of the hidden states is wanted.
            needs: The same for each adapter tensor and each prefix tensor.

        Raises:
            MissingBlocksError: If no living server holds some block.
            SwarmError: If a server refuses the request, or too many servers failed.
        """
        num_adapter = len(self.inputs.adapters.tensors)
        collected = _Collected(
            adapters=[None] * num_adapter,
            prefix=[None] * len(self.inputs.prefix),
            needs_adapters=any(needs[:num_adapter]),
            needs_prefix=any(needs[num_adapter:]),
        )
        grad: Tensor | None = grads.hidden
        retries = Retries(self.view, self.peers.config.max_retries)
        lowest = self._lowest_block_with_gradient(needs_hidden, needs)
        pending = list(self._runs)
        while pending and grad is not None:
            run = pending.pop()
            if run.span.end <= lowest:
                break
            try:
                answer = await self._backward_span(run, grad, grads, collected, needs_input=run.span.start > lowest)
            except SwarmError as exc:
                if isinstance(exc, TicketLostError) and run.response.ticket is not None:
                    # The server is well, only the graph is gone: it gets the inputs again.
                    pending.append(_without_ticket(run))
                else:
                    retries.note(run.span.peer, exc)
                    blocks = range(run.span.start, run.span.end)
                    pending.extend(await self._forward_blocks(blocks, run.hidden, retries))
                continue
            grad = answer.grad_hidden
            if self.inputs.collect_hidden and run.span.start > self._first and grad is not None:
                grad = grad + grads.hidden_states[run.span.start - self._first - 1]
        retries.succeeded()
        # Graphs on servers serve one backward; another one starts from the inputs.
        self._runs = [_without_ticket(run) for run in self._runs]
        return [grad if needs_hidden else None, *collected.adapters, *collected.prefix]

    def _lowest_block_with_gradient(self, needs_hidden: bool, needs: Sequence[bool]) -> int:
        """Below this block nothing needs a gradient, so the backward stops there."""
        if needs_hidden or any(needs[len(self.inputs.adapters.tensors) :]):
            return -1
        lowest = self._runs[-1].span.end if self._runs else 0
        index = 0
        for adapter in self.inputs.adapters.adapters:
            for module in adapter.spec.modules:
                if any(needs[index : index + len(module.shapes)]):
                    lowest = min(lowest, module.block)
                index += len(module.shapes)
        return lowest

    async def _backward_span(
        self, run: _SpanRun, grad: Tensor, grads: BlockOutputs, collected: _Collected, *, needs_input: bool
    ) -> BackwardResponse:
        span, ticket = run.span, run.response.ticket
        first, last = span.start - self._first, span.end - self._first - 1
        inner = grads.hidden_states[first:last] if self.inputs.collect_hidden else []
        routers = [
            g
            for block, g in zip(grads.router_blocks, grads.router_logits, strict=True)
            if span.start <= block < span.end
        ]
        request = BackwardRequest(
            ticket=ticket,
            forward=None if ticket else self._request(span, run.hidden, run.part, keep=False),
            grad_hidden=grad.contiguous(),
            grad_hidden_states=tuple(inner),
            grad_router_logits=tuple(routers),
            needs_hidden=needs_input,
            needs_adapters=collected.needs_adapters and bool(run.part.indices),
            needs_prefix=collected.needs_prefix,
            reply_codec=self.peers.config.codec,
        )
        answer = await self.peers.request_with_adapters(
            span.peer, "rpc_backward", request, BackwardResponse, run.part.shipped
        )
        self._check_gradients(answer, request, run)
        self.view.bans.forgive(span.peer)
        if request.needs_adapters:
            for index, value in zip(run.part.indices, answer.grad_adapters, strict=True):
                collected.adapters[index] = value
        if request.needs_prefix:
            collected.prefix[self._prefix_slice(span)] = answer.grad_prefix
        return answer

    def _check_gradients(self, answer: BackwardResponse, request: BackwardRequest, run: _SpanRun) -> None:
        peer = run.span.peer
        if request.needs_hidden:
            check_tensor(answer.grad_hidden, run.hidden, peer, "the gradient of the hidden states")
        expected = [t for adapter in run.part.shipped for t in adapter.tensors] if request.needs_adapters else []
        prefix = self._prefix_of(run.span) if request.needs_prefix else ()
        for name, got, want in (
            ("adapter", answer.grad_adapters, expected),
            ("prefix", answer.grad_prefix, prefix),
        ):
            if len(got) != len(want):
                raise ProtocolError(f"server {peer} returned {len(got)} {name} gradients, {len(want)} were asked for")
            for value, reference in zip(got, want, strict=True):
                check_tensor(value, reference, peer, f"an {name} gradient")


@dataclass(kw_only=True)
class _Collected:
    """Gradients gathered from the spans."""

    adapters: list[Tensor | None]
    prefix: list[Tensor | None]
    needs_adapters: bool
    needs_prefix: bool


def _without_ticket(run: _SpanRun) -> _SpanRun:
    """Returns a run whose backward sends the inputs along."""
    return replace(run, response=ForwardResponse(hidden=run.response.hidden))
