"""The backward of a chunk through the servers of its forward, repaired span by span when servers fail."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from swarm_plugins.block_io import SpanInputs, SpanOutputs
from swarm_plugins.client.answers import TicketLostError, check_gradients
from swarm_plugins.client.handing import is_handing_on
from swarm_plugins.client.observer import BackwardCall
from swarm_plugins.client.training.asking import answer_in_turn, won_answer
from swarm_plugins.client.training.posting import Posted, Span
from swarm_plugins.client.training.records import Attempt, SpanRun
from swarm_plugins.errors import SwarmError
from swarm_plugins.transport.messages import BackwardRequest, BackwardResponse, PushSlot
from swarm_plugins.transport.pushed import emptied_backward, plain_backward

if TYPE_CHECKING:
    from swarm_plugins.client.discovery.view import Servers
    from swarm_plugins.client.retries import ChainRetries
    from swarm_plugins.client.training.forward import Forward


class Backward:
    """Finds the gradients of a chunk; raises like `ChainCall.backward`.

    Args:
        servers: The swarm.
        forward: Runs the blocks of a lost server again.
        inputs: Of the chunk.
        grads: The gradients of its outputs.
        needs_hidden: Whether the gradient of hidden states is wanted.
        needs: The same for each tensor of adapters and prefix.
        retries: The batch's.
    """

    def __init__(
        self,
        servers: Servers,
        forward: Forward,
        inputs: SpanInputs,
        grads: SpanOutputs,
        *,
        needs_hidden: bool,
        needs: Sequence[bool],
        retries: ChainRetries,
    ) -> None:
        num_adapter = len(inputs.adapters.tensors)
        self._servers = servers
        self._forward = forward
        self._inputs = inputs
        self._grads = grads
        self._needs_hidden = needs_hidden
        self._needs_of_adapters, self._needs_of_prefix = needs[:num_adapter], needs[num_adapter:]
        self._retries = retries
        self._posted = _PostedBackwards(servers)
        self._lowest = self._lowest_block_with_gradient()
        self._adapters: list[Tensor | None] = [None] * num_adapter
        """Gradients found so far."""
        self._prefix: list[Tensor | None] = [None] * len(inputs.prefix)

    async def run(self, runs: Sequence[SpanRun]) -> list[Tensor | None]:
        """Goes back through the spans of the forward; returns the gradients of hidden states, adapters and prefix."""
        visited = [run for run in runs if run.inputs.blocks.stop > self._lowest]
        self._tell(visited[::-1])
        try:
            grad = await self._run_spans(visited)
        finally:
            await self._posted.close()
        return [grad if self._needs_hidden else None, *self._adapters, *self._prefix]

    def _lowest_block_with_gradient(self) -> int:
        """Returns the block at which the backward can stop: below it nothing needs a gradient."""
        if self._needs_hidden or any(self._needs_of_prefix):
            return -1
        lowest, index = self._inputs.blocks.stop, 0
        for adapter in self._inputs.adapters.adapters:
            for blocks in adapter.spec.tensor_blocks():
                if self._needs_of_adapters[index]:
                    lowest = min(lowest, *blocks)
                index += 1
        return lowest

    def _tell(self, runs: Sequence[SpanRun]) -> None:
        # Gradients of states between spans are added here, on the way from one to the next.
        if self._inputs.collect_hidden or not is_handing_on(self._servers, [run.peer for run in runs]):
            return
        spans, grad = [], self._grads.hidden
        for run, after in itertools.zip_longest(runs, runs[1:]):
            request = self._request(run, grad, [run.peer] if after is None else [run.peer, after.peer])
            spans.append(
                Span(run.peer, run.inputs.blocks, request, run.part.shipped, run.inputs.num_tokens, grad.nbytes)
            )
        self._posted.tell(spans)

    async def _run_spans(self, runs: Sequence[SpanRun]) -> Tensor | None:
        """Returns the gradient of the lowest span's input."""
        retries, grad = self._retries, self._grads.hidden
        pending = [(run, Attempt(retries, 0)) for run in runs]
        while pending:
            run, attempt = pending.pop()
            try:
                answer = await self._run_span(run, grad, attempt)
            except SwarmError as exc:
                if isinstance(exc, TicketLostError) and run.has_ticket:
                    # The server is fine, only the graph is gone: send the inputs again.
                    self._servers.note_unkept(run.peer, run.inputs.num_tokens)
                    pending.append((run.without_ticket(), attempt))
                else:
                    retries.note(run.peer, exc, attempt.since)
                    attempt = Attempt(retries, retries.moment)
                    pending += [(again, attempt) for again in await self._forward.run_again(run.inputs, retries)]
                continue
            retries.progressed()
            if answer.grad_hidden is None:
                return None
            grad = answer.grad_hidden
            before = self._index(run.inputs.blocks.start)
            if self._inputs.collect_hidden and before > 0:
                grad = grad + self._grads.hidden_states[before - 1]
        return grad

    def _index(self, block: int) -> int:
        return block - self._inputs.blocks.start

    async def _run_span(self, run: SpanRun, grad: Tensor, attempt: Attempt) -> BackwardResponse:
        servers, view, posted, blocks = self._servers, self._servers.view, self._posted, run.inputs.blocks
        sent: dict[str, BackwardRequest] = {}

        async def ask(peer: str) -> tuple[str, BackwardResponse]:
            if (found := await posted.collect(peer, blocks, grad)) is not None:
                sent[peer], response = found
            else:
                sent[peer] = self._request(run, grad, posted.receivers(peer, blocks))
                message = posted.handed_on(peer, blocks, sent[peer])
                response = await answer_in_turn(
                    servers, peer, run.part, "rpc_backward", message, BackwardResponse, run.inputs, attempt
                )
            adapters = [tensor for adapter in run.part.shipped for tensor in adapter.tensors]
            check_gradients(response, sent[peer], run.inputs, adapters, peer)
            posted.answered(peer, blocks, response)
            return peer, response

        async def accept(peer: str, response: BackwardResponse) -> None:
            await view.observer.backward_done(
                BackwardCall(
                    peer=peer,
                    info=view.known.infos.get(peer),
                    forward=run.request,
                    outputs=run.response,
                    adapters=run.part.shipped,
                    request=sent[peer],
                    response=response,
                )
            )

        without = attempt.retries.excluded
        peer, answer = await won_answer(servers, run.peer, "rpc_backward", run.inputs, without, ask, accept)
        if sent[peer].needs_adapters:
            for index, value in zip(run.part.indices, answer.grad_adapters, strict=True):
                # Tensors that several spans share get the sum of their gradients.
                known = self._adapters[index]
                self._adapters[index] = value if known is None else known + value
        if sent[peer].needs_prefix:
            first, last = self._index(blocks.start), self._index(blocks.stop)
            self._prefix[2 * first : 2 * last] = answer.grad_prefix
        return answer

    def _request(self, run: SpanRun, grad: Tensor, receivers: Sequence[str]) -> BackwardRequest:
        """Returns the request to the first of the receivers; another one may get the gradient of its input."""
        blocks, grads = run.inputs.blocks, self._grads
        first, last = self._index(blocks.start), self._index(blocks.stop)
        routers = zip(grads.router_blocks, grads.router_logits, strict=True)
        # The graph is kept by the server of the forward; others run it again, with the same dropout.
        is_kept = run.has_ticket and receivers[0] == run.peer
        codec = self._servers.view.codecs.between(grad, *receivers)
        if codec != run.request.reply_codec:
            codec = "none"  # a check tells from the forward how far a gradient may be off
        return BackwardRequest(
            ticket=run.response.ticket if is_kept else None,
            forward=None if is_kept else msgspec.structs.replace(run.request, keep=False, reply_codec=codec),
            grad_hidden=grad.contiguous(),
            grad_hidden_states=grads.hidden_states[first : last - 1] if self._inputs.collect_hidden else (),
            grad_router_logits=tuple(gradient for block, gradient in routers if block in blocks),
            needs_hidden=blocks.start > self._lowest,
            needs_adapters=any(self._needs_of_adapters) and bool(run.part.indices),
            needs_prefix=any(self._needs_of_prefix),
            reply_codec=codec,
            nonce=self._servers.view.observer.nonce(),
        )


class _PostedBackwards(Posted[BackwardRequest, BackwardResponse]):
    rpc = "rpc_backward"
    kind = BackwardResponse

    def plain(self, request: BackwardRequest, tensor: Tensor) -> BackwardRequest:
        return plain_backward(request, tensor)

    def emptied(self, request: BackwardRequest, slot: PushSlot) -> BackwardRequest:
        return emptied_backward(request, slot)
