"""Forward and backward of a chunk through a chain of servers, repaired span by span when servers fail."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from swarm_plugins.block_io import SpanInputs, SpanOutputs, chain_outputs
from swarm_plugins.book.record import Forgiven, Unkept
from swarm_plugins.client.answers import TicketLostError
from swarm_plugins.client.calls.call import Call, Request, Response
from swarm_plugins.client.calls.pushing import Told, close_all, is_pushing, tell
from swarm_plugins.client.digests import CallAdapters
from swarm_plugins.client.training.spans import Attempt, BackwardCall, ForwardCall, Needs, SpanRun
from swarm_plugins.errors import RefusedError, SwarmError
from swarm_plugins.routing import Demand, SpanChoice

if TYPE_CHECKING:
    from swarm_plugins.client.calls.call import Answer
    from swarm_plugins.client.calls.retries import ChainRetries
    from swarm_plugins.client.servers import Servers
    from swarm_plugins.transport.messages import BackwardRequest, BackwardResponse


class ChainCall:
    """Runs blocks for one chunk of a batch; chunks of a batch share their retries and adapters.

    The inputs of each span stay here as long as the graph does: a lost server costs one span's work, never the step,
    and a second backward (``retain_graph=True``) gets the same gradients.

    Args:
        servers: The swarm.
        inputs: The chunk.
        keep: Whether a backward will follow.
        adapters: The batch's.
    """

    def __init__(self, servers: Servers, inputs: SpanInputs, *, keep: bool, adapters: CallAdapters) -> None:
        self.inputs = inputs
        self._servers = servers
        self._keep = keep
        self._adapters = adapters
        self._runs: list[SpanRun] = []

    async def forward(self, retries: ChainRetries, chain: Sequence[SpanChoice]) -> SpanOutputs:
        """Runs the blocks on a chain, or on other servers if these fail.

        Raises:
            MissingBlocksError: If no server is left for some block.
            SwarmError: After too many failures.
        """
        attempt = Attempt(retries, 0)
        calls: list[tuple[str, ForwardCall]] = []
        if is_pushing(self._servers.peers, [span.peer for span in chain]):
            calls = [
                (peer, self._call(self.inputs.take_blocks(range(start, end), self.inputs.hidden), attempt))
                for peer, start, end in chain
            ]
        async with _told(self._servers, calls):
            runs = await self._run_spans(self.inputs, chain, attempt, calls)
        if self._keep:
            self._runs = runs
        return chain_outputs([run.response for run in runs], collect_hidden=self.inputs.collect_hidden)

    async def run_again(self, inputs: SpanInputs, retries: ChainRetries) -> list[SpanRun]:
        """Runs a lost server's blocks on others."""
        attempt = Attempt(retries, retries.moment)
        chain = await retries.chain(inputs.blocks, Demand(tokens=inputs.num_tokens))
        return await self._run_spans(inputs, chain, attempt)

    async def _run_spans(
        self,
        inputs: SpanInputs,
        chain: Sequence[SpanChoice],
        attempt: Attempt,
        told: Sequence[tuple[str, ForwardCall]] = (),
    ) -> list[SpanRun]:
        demand, last = Demand(tokens=inputs.num_tokens), inputs.blocks.stop
        retries, queue, hidden = attempt.retries, deque(chain), inputs.hidden
        ahead = {(peer, call.blocks): call for peer, call in told}
        runs: list[SpanRun] = []
        while queue:
            peer, start, end = queue.popleft()
            span = inputs.take_blocks(range(start, end), hidden)
            call = ahead.pop((peer, span.blocks), None) or self._call(span, attempt)
            call.inputs, call.attempt = span, attempt
            try:
                runs.append(await self._run_span(call, peer))
            except SwarmError as exc:
                retries.note(peer, exc, attempt.since)
                attempt = Attempt(retries, retries.moment)
                if isinstance(exc, RefusedError):
                    # Replan only these blocks: this server may be the only one for the rest, and serve that well.
                    queue.extendleft(reversed(await retries.chain(range(start, end), demand)))
                else:
                    queue = deque(await retries.chain(range(start, last), demand))
                continue
            hidden = runs[-1].response.hidden
            retries.progressed()
        return runs

    def _call(self, inputs: SpanInputs, attempt: Attempt) -> ForwardCall:
        part = self._adapters.part(inputs.blocks)
        return ForwardCall(self._servers, inputs, part, keep=self._keep, attempt=attempt)

    async def _run_span(self, call: ForwardCall, peer: str) -> SpanRun:
        servers, tokens = self._servers, call.tokens
        peer, request, response, is_pushed = await servers.caller.ask(call, peer)
        servers.peers.book.observe(peer, Forgiven())
        has_ticket = response.ticket is not None
        if self._keep and not has_ticket:
            servers.peers.book.observe(peer, Unkept(tokens))
            servers.note_unkept(peer, tokens)
        return SpanRun(
            peer=peer,
            inputs=call.inputs,
            part=call.part,
            request=request,
            response=response,
            is_pushed=is_pushed,
            has_ticket=has_ticket,
        )

    async def backward(
        self, grads: SpanOutputs, *, needs_hidden: bool, needs: Sequence[bool], retries: ChainRetries
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
        backward = _Backward(self._servers, self, grads, self._needs(needs_hidden, needs), retries)
        found = await backward.run(self._runs)
        # A kept graph serves one backward; another one starts from the inputs.
        self._runs = [run.without_ticket() for run in self._runs]
        return found

    def _needs(self, needs_hidden: bool, needs: Sequence[bool]) -> Needs:
        num_adapter = len(self.inputs.adapters.tensors)
        of_adapters, of_prefix = needs[:num_adapter], needs[num_adapter:]
        lowest, index = self.inputs.blocks.stop, 0
        for adapter in self.inputs.adapters.adapters:
            for blocks in adapter.spec.tensor_blocks():
                if of_adapters[index]:
                    lowest = min(lowest, *blocks)
                index += 1
        if needs_hidden or any(of_prefix):
            lowest = -1
        return Needs(hidden=needs_hidden, adapters=of_adapters, prefix=of_prefix, lowest=lowest)


class _Backward:
    """One backward of a chunk."""

    def __init__(
        self, servers: Servers, chunk: ChainCall, grads: SpanOutputs, needs: Needs, retries: ChainRetries
    ) -> None:
        self._servers = servers
        self._chunk = chunk
        self._start = chunk.inputs.blocks.start
        self._grads = grads
        self._needs = needs
        self._retries = retries
        self._adapters: list[Tensor | None] = [None] * len(needs.adapters)
        """Gradients found so far."""
        self._prefix: list[Tensor | None] = [None] * len(chunk.inputs.prefix)

    async def run(self, runs: Sequence[SpanRun]) -> list[Tensor | None]:
        """Goes back through the spans of the forward; returns the gradients of hidden states, adapters and prefix."""
        visited = [run for run in runs if run.inputs.blocks.stop > self._needs.lowest]
        calls: list[tuple[str, BackwardCall]] = []
        # Gradients of states between spans are added here, on the way from one to the next.
        is_handed = not self._chunk.inputs.collect_hidden
        if is_handed and is_pushing(self._servers.peers, [run.peer for run in reversed(visited)]):
            attempt = Attempt(self._retries, 0)
            calls = [(run.peer, self._call(run, self._grads.hidden, attempt)) for run in reversed(visited)]
        async with _told(self._servers, calls):
            grad = await self._run_spans(visited, calls)
        return [grad if self._needs.hidden else None, *self._adapters, *self._prefix]

    def _call(self, run: SpanRun, grad: Tensor, attempt: Attempt) -> BackwardCall:
        return BackwardCall(self._servers, run, grad, self._grads, self._needs, start=self._start, attempt=attempt)

    async def _run_spans(self, runs: Sequence[SpanRun], told: Sequence[tuple[str, BackwardCall]]) -> Tensor | None:
        """Returns the gradient of the lowest span's input."""
        retries, grad = self._retries, self._grads.hidden
        ahead = {(peer, call.blocks): call for peer, call in told}
        pending = [(run, Attempt(retries, 0)) for run in runs]
        while pending:
            run, attempt = pending.pop()
            call = ahead.pop((run.peer, run.inputs.blocks), None) or self._call(run, grad, attempt)
            call.run, call.grad, call.attempt = run, grad, attempt
            try:
                answer = await self._servers.caller.ask(call, run.peer)
            except SwarmError as exc:
                if isinstance(exc, TicketLostError) and run.has_ticket:
                    # The server is fine, only the graph is gone: send the inputs again.
                    self._servers.note_unkept(run.peer, run.inputs.num_tokens)
                    pending.append((run.without_ticket(), attempt))
                else:
                    retries.note(run.peer, exc, attempt.since)
                    attempt = Attempt(retries, retries.moment)
                    pending += [(again, attempt) for again in await self._chunk.run_again(run.inputs, retries)]
                continue
            self._servers.peers.book.observe(answer.peer, Forgiven())
            self._add(call, answer)
            retries.progressed()
            if answer.response.grad_hidden is None:
                return None
            grad = answer.response.grad_hidden
            before = run.inputs.blocks.start - self._start
            if self._chunk.inputs.collect_hidden and before > 0:
                grad = grad + self._grads.hidden_states[before - 1]
        return grad

    def _add(self, call: BackwardCall, answer: Answer[BackwardRequest, BackwardResponse]) -> None:
        """Adds the gradients that a span has found."""
        if answer.request.needs_adapters:
            for index, value in zip(call.run.part.indices, answer.response.grad_adapters, strict=True):
                # Tensors that several spans share get the sum of their gradients.
                known = self._adapters[index]
                self._adapters[index] = value if known is None else known + value
        if answer.request.needs_prefix:
            first, last = (2 * (block - self._start) for block in (call.blocks.start, call.blocks.stop))
            self._prefix[first:last] = answer.response.grad_prefix


@contextlib.asynccontextmanager
async def _told(servers: Servers, calls: Sequence[tuple[str, Call[Request, Response]]]) -> AsyncIterator[None]:
    """Tells all servers of a chain but the first of their calls, in the background; not those with too many already."""
    told: list[Told[Request, Response]] = []
    for (sender, one), (peer, two) in itertools.pairwise(calls):
        record = servers.peers.book.kept(peer)
        if record.backlog.claim(two.tokens, room=0 if record.info is None else record.info.max_batch_tokens):
            slot = servers.new_slot(two.input().nbytes)
            ahead = Told(servers.peers, servers.view, two, peer, slot, sender=sender)
            ahead.at_end(functools.partial(record.backlog.release, two.tokens))
            two.told = one.next = ahead
            told.append(ahead)
    telling = [asyncio.create_task(tell([call]), name="tell of a call") for call in told]
    try:
        yield
    finally:
        await close_all(telling, told)
