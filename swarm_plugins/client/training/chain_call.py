"""One forward through a chain of servers and its backward, repaired span by span when servers fail.

The inputs of each span stay here as long as the graph does: a lost server costs one span's work, never the step, and
a second backward (``retain_graph=True``) gets the same gradients.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
from torch import Tensor

from swarm_plugins.block_io import SpanInputs, SpanOutputs, chain_outputs
from swarm_plugins.client.answers import OverloadedError, TicketLostError, check_gradients, check_outputs
from swarm_plugins.client.digests import CallAdapters
from swarm_plugins.client.handing import is_handing_on
from swarm_plugins.client.observer import BackwardCall, ForwardCall
from swarm_plugins.client.retries import ChainRetries
from swarm_plugins.client.training.posting import PostedBackwards, PostedForwards, Span
from swarm_plugins.client.training.racing import won_answer
from swarm_plugins.client.training.records import Attempt, Collected, SpanRun
from swarm_plugins.errors import CapacityError, RefusedError, SwarmError
from swarm_plugins.routing import Demand, SpanChoice
from swarm_plugins.transport.messages import BackwardRequest, BackwardResponse, ForwardRequest, ForwardResponse, Message

if TYPE_CHECKING:
    from swarm_plugins.client.digests import AdapterPart
    from swarm_plugins.client.discovery.view import Servers

M = TypeVar("M", bound=Message)


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
        self._runs: list[SpanRun] = []

    async def forward(self, retries: ChainRetries, chain: Sequence[SpanChoice]) -> SpanOutputs:
        """Runs the blocks on a chain, or on other servers if these fail.

        Raises:
            MissingBlocksError: If no server is left for some block.
            SwarmError: After too many failures.
        """
        posted = PostedForwards(self.servers)
        self._tell_forwards(posted, chain)
        try:
            runs = await self._forward_blocks(self.inputs, retries, chain, posted)
        finally:
            await posted.close()
        if self.keep:
            self._runs = runs
        return chain_outputs([run.response for run in runs], collect_hidden=self.inputs.collect_hidden)

    @property
    def unkept(self) -> list[str]:
        """Servers that do not keep the graph for the backward to come."""
        return [run.peer for run in self._runs if not run.has_ticket]

    def _tell_forwards(self, posted: PostedForwards, chain: Sequence[SpanChoice]) -> None:
        if not is_handing_on(self.servers, [span.peer for span in chain]):
            return
        spans, hidden = [], self.inputs.hidden
        for (peer, start, end), after in itertools.zip_longest(chain, chain[1:]):
            inputs = self.inputs.take_blocks(range(start, end), hidden)
            part = self._adapters.part(inputs.blocks)
            codec = self.servers.view.codecs.between(hidden, peer, *([after.peer] if after else []))
            request = msgspec.structs.replace(self._request(inputs, part), reply_codec=codec)
            spans.append(Span(peer, inputs.blocks, request, part.shipped, inputs.num_tokens, hidden.nbytes))
        posted.tell(spans)

    async def _forward_blocks(
        self,
        inputs: SpanInputs,
        retries: ChainRetries,
        chain: Sequence[SpanChoice] | None = None,
        posted: PostedForwards | None = None,
    ) -> list[SpanRun]:
        posted = posted or PostedForwards(self.servers)
        demand, last = Demand(tokens=inputs.num_tokens), inputs.blocks.stop
        since = retries.moment if chain is None else 0
        queue = deque(await retries.chain(inputs.blocks, demand) if chain is None else chain)
        hidden = inputs.hidden
        runs: list[SpanRun] = []
        while queue:
            peer, start, end = queue.popleft()
            try:
                part = inputs.take_blocks(range(start, end), hidden)
                runs.append(await self._forward_span(peer, part, Attempt(retries, since), posted))
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

    async def _forward_span(self, peer: str, inputs: SpanInputs, attempt: Attempt, posted: PostedForwards) -> SpanRun:
        part = self._adapters.part(inputs.blocks)
        request = self._request(inputs, part)
        view = self.servers.view
        sent: dict[str, ForwardRequest] = {}

        async def ask(peer: str) -> tuple[str, ForwardResponse]:
            if (found := await posted.collect(peer, inputs.blocks, inputs.hidden)) is not None:
                sent[peer], response = found
            else:
                codec = view.codecs.between(inputs.hidden, *posted.receivers(peer, inputs.blocks))
                sent[peer] = msgspec.structs.replace(request, reply_codec=codec)
                message = posted.handed_on(peer, inputs.blocks, sent[peer])
                response = await self._ask(peer, part, "rpc_forward", message, ForwardResponse, inputs, attempt)
            check_outputs(response, inputs, peer)
            posted.answered(peer, inputs.blocks, response)
            return peer, response

        async def accept(peer: str, response: ForwardResponse) -> None:
            info, adapters = view.known.infos.get(peer), part.shipped
            await view.observer.forward_done(
                ForwardCall(peer=peer, info=info, request=sent[peer], adapters=adapters, response=response)
            )

        without = attempt.retries.excluded
        peer, response = await won_answer(self.servers, peer, "rpc_forward", inputs, without, ask, accept)
        has_ticket = response.ticket is not None
        if self.keep and not has_ticket:
            self.servers.note_unkept(peer, inputs.num_tokens)
        return SpanRun(
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

    async def _ask(
        self,
        peer: str,
        part: AdapterPart,
        rpc: str,
        request: Message,
        kind: type[M],
        inputs: SpanInputs,
        attempt: Attempt,
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
        collected = Collected(
            adapters=[None] * num_adapter,
            prefix=[None] * len(self.inputs.prefix),
            needs_adapters=any(needs[:num_adapter]),
            needs_prefix=any(needs[num_adapter:]),
        )
        lowest = self._lowest_block_with_gradient(needs_hidden, needs)
        visited = [run for run in self._runs if run.inputs.blocks.stop > lowest]
        posted = PostedBackwards(self.servers)
        self._tell_backwards(posted, visited[::-1], grads, collected, lowest)
        try:
            grad = await self._backward_blocks(visited, grads, collected, retries, lowest, posted)
        finally:
            await posted.close()
        # A kept graph serves one backward; another one starts from the inputs.
        self._runs = [run.without_ticket() for run in self._runs]
        return [grad if needs_hidden else None, *collected.adapters, *collected.prefix]

    def _tell_backwards(
        self, posted: PostedBackwards, runs: Sequence[SpanRun], grads: SpanOutputs, collected: Collected, lowest: int
    ) -> None:
        # Gradients of states between spans are added here, on the way from one to the next.
        if self.inputs.collect_hidden or not is_handing_on(self.servers, [run.peer for run in runs]):
            return
        spans, grad = [], grads.hidden
        for run, after in itertools.zip_longest(runs, runs[1:]):
            receivers = [run.peer] if after is None else [run.peer, after.peer]
            request = self._backward_request(run, grad, grads, collected, lowest, receivers)
            spans.append(
                Span(run.peer, run.inputs.blocks, request, run.part.shipped, run.inputs.num_tokens, grad.nbytes)
            )
        posted.tell(spans)

    async def _backward_blocks(
        self,
        runs: Sequence[SpanRun],
        grads: SpanOutputs,
        collected: Collected,
        retries: ChainRetries,
        lowest: int,
        posted: PostedBackwards,
    ) -> Tensor | None:
        grad: Tensor | None = grads.hidden
        pending = [(run, 0) for run in runs]
        while pending and grad is not None:
            run, since = pending.pop()
            try:
                attempt = Attempt(retries, since)
                answer = await self._backward_span(run, grad, grads, collected, attempt, lowest, posted)
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
            before = self._index(run.inputs.blocks.start)
            if self.inputs.collect_hidden and before > 0 and grad is not None:
                grad = grad + grads.hidden_states[before - 1]
        return grad

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

    def _backward_request(
        self,
        run: SpanRun,
        grad: Tensor,
        grads: SpanOutputs,
        collected: Collected,
        lowest: int,
        receivers: Sequence[str],
    ) -> BackwardRequest:
        """Returns the request to the first of the receivers; another one may get the gradient of its input."""
        blocks = run.inputs.blocks
        first, last = self._index(blocks.start), self._index(blocks.stop)
        routers = zip(grads.router_blocks, grads.router_logits, strict=True)
        # The graph is kept by the server of the forward; others run it again, with the same dropout.
        is_kept = run.has_ticket and receivers[0] == run.peer
        codec = self.servers.view.codecs.between(grad, *receivers)
        if codec != run.request.reply_codec:
            codec = "none"  # a check tells from the forward how far a gradient may be off
        return BackwardRequest(
            ticket=run.response.ticket if is_kept else None,
            forward=None if is_kept else msgspec.structs.replace(run.request, keep=False, reply_codec=codec),
            grad_hidden=grad.contiguous(),
            grad_hidden_states=grads.hidden_states[first : last - 1] if self.inputs.collect_hidden else (),
            grad_router_logits=tuple(gradient for block, gradient in routers if block in blocks),
            needs_hidden=blocks.start > lowest,
            needs_adapters=collected.needs_adapters and bool(run.part.indices),
            needs_prefix=collected.needs_prefix,
            reply_codec=codec,
            nonce=self.servers.view.observer.nonce(),
        )

    async def _backward_span(
        self,
        run: SpanRun,
        grad: Tensor,
        grads: SpanOutputs,
        collected: Collected,
        attempt: Attempt,
        lowest: int,
        posted: PostedBackwards,
    ) -> BackwardResponse:
        view, blocks = self.servers.view, run.inputs.blocks
        sent: dict[str, BackwardRequest] = {}

        async def ask(peer: str) -> tuple[str, BackwardResponse]:
            if (found := await posted.collect(peer, blocks, grad)) is not None:
                sent[peer], response = found
            else:
                receivers = posted.receivers(peer, blocks)
                sent[peer] = self._backward_request(run, grad, grads, collected, lowest, receivers)
                message = posted.handed_on(peer, blocks, sent[peer])
                kind, inputs = BackwardResponse, run.inputs
                response = await self._ask(peer, run.part, "rpc_backward", message, kind, inputs, attempt)
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
        peer, answer = await won_answer(self.servers, run.peer, "rpc_backward", run.inputs, without, ask, accept)
        if sent[peer].needs_adapters:
            for index, value in zip(run.part.indices, answer.grad_adapters, strict=True):
                collected.adapters[index] = value
        if sent[peer].needs_prefix:
            first, last = self._index(blocks.start), self._index(blocks.stop)
            collected.prefix[2 * first : 2 * last] = answer.grad_prefix
        return answer
