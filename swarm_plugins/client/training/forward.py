"""The forward of a chunk through a chain of servers, repaired span by span when servers fail."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from swarm_plugins.block_io import SpanInputs
from swarm_plugins.client.answers import check_outputs
from swarm_plugins.client.digests import CallAdapters
from swarm_plugins.client.handing import is_handing_on
from swarm_plugins.client.observer import ForwardCall
from swarm_plugins.client.training.asking import answer_in_turn, won_answer
from swarm_plugins.client.training.posting import Posted, Span
from swarm_plugins.client.training.records import Attempt, SpanRun
from swarm_plugins.errors import RefusedError, SwarmError
from swarm_plugins.routing import Demand, SpanChoice
from swarm_plugins.transport.messages import ForwardRequest, ForwardResponse, PushSlot
from swarm_plugins.transport.pushed import emptied_forward, plain_forward

if TYPE_CHECKING:
    from swarm_plugins.client.digests import AdapterPart
    from swarm_plugins.client.discovery.view import Servers
    from swarm_plugins.client.retries import ChainRetries


class Forward:
    """Runs blocks of a chunk, all of them or those of a lost server; raises like `ChainCall.forward`.

    Args:
        servers: The swarm.
        keep: Whether a backward will follow.
        adapters: The batch's.
    """

    def __init__(self, servers: Servers, *, keep: bool, adapters: CallAdapters) -> None:
        self._servers = servers
        self._keep = keep
        self._adapters = adapters

    async def run(self, inputs: SpanInputs, retries: ChainRetries, chain: Sequence[SpanChoice]) -> list[SpanRun]:
        """Runs blocks on a planned chain, whose servers hand on their outputs if that pays."""
        posted = _PostedForwards(self._servers)
        self._tell(posted, inputs, chain)
        try:
            return await self._run_spans(inputs, chain, Attempt(retries, 0), posted)
        finally:
            await posted.close()

    async def run_again(self, inputs: SpanInputs, retries: ChainRetries) -> list[SpanRun]:
        """Runs a lost server's blocks on others."""
        attempt = Attempt(retries, retries.moment)
        chain = await retries.chain(inputs.blocks, Demand(tokens=inputs.num_tokens))
        return await self._run_spans(inputs, chain, attempt, _PostedForwards(self._servers))

    def _tell(self, posted: _PostedForwards, inputs: SpanInputs, chain: Sequence[SpanChoice]) -> None:
        if not is_handing_on(self._servers, [span.peer for span in chain]):
            return
        spans, hidden = [], inputs.hidden
        for (peer, start, end), after in itertools.zip_longest(chain, chain[1:]):
            cut = inputs.take_blocks(range(start, end), hidden)
            part = self._adapters.part(cut.blocks)
            codec = self._servers.view.codecs.between(hidden, peer, *([after.peer] if after else []))
            request = msgspec.structs.replace(self._request(cut, part), reply_codec=codec)
            spans.append(Span(peer, cut.blocks, request, part.shipped, cut.num_tokens, hidden.nbytes))
        posted.tell(spans)

    async def _run_spans(
        self, inputs: SpanInputs, chain: Sequence[SpanChoice], attempt: Attempt, posted: _PostedForwards
    ) -> list[SpanRun]:
        demand, last = Demand(tokens=inputs.num_tokens), inputs.blocks.stop
        retries, queue, hidden = attempt.retries, deque(chain), inputs.hidden
        runs: list[SpanRun] = []
        while queue:
            peer, start, end = queue.popleft()
            try:
                runs.append(await self._run_span(peer, inputs.take_blocks(range(start, end), hidden), attempt, posted))
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

    async def _run_span(self, peer: str, inputs: SpanInputs, attempt: Attempt, posted: _PostedForwards) -> SpanRun:
        servers, view, part = self._servers, self._servers.view, self._adapters.part(inputs.blocks)
        request = self._request(inputs, part)
        sent: dict[str, ForwardRequest] = {}

        async def ask(peer: str) -> tuple[str, ForwardResponse]:
            if (found := await posted.collect(peer, inputs.blocks, inputs.hidden)) is not None:
                sent[peer], response = found
            else:
                codec = view.codecs.between(inputs.hidden, *posted.receivers(peer, inputs.blocks))
                sent[peer] = msgspec.structs.replace(request, reply_codec=codec)
                message = posted.handed_on(peer, inputs.blocks, sent[peer])
                response = await answer_in_turn(
                    servers, peer, part, "rpc_forward", message, ForwardResponse, inputs, attempt
                )
            check_outputs(response, inputs, peer)
            posted.answered(peer, inputs.blocks, response)
            return peer, response

        async def accept(peer: str, response: ForwardResponse) -> None:
            info, adapters = view.known.infos.get(peer), part.shipped
            await view.observer.forward_done(
                ForwardCall(peer=peer, info=info, request=sent[peer], adapters=adapters, response=response)
            )

        without = attempt.retries.excluded
        peer, response = await won_answer(servers, peer, "rpc_forward", inputs, without, ask, accept)
        has_ticket = response.ticket is not None
        if self._keep and not has_ticket:
            servers.note_unkept(peer, inputs.num_tokens)
        return SpanRun(
            peer=peer, inputs=inputs, part=part, request=sent[peer], response=response, has_ticket=has_ticket
        )

    def _request(self, inputs: SpanInputs, part: AdapterPart) -> ForwardRequest:
        return ForwardRequest(
            version=self._servers.view.version.key,
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
            keep=self._keep,
            nonce=self._servers.view.observer.nonce(),
        )


class _PostedForwards(Posted[ForwardRequest, ForwardResponse]):
    rpc = "rpc_forward"
    kind = ForwardResponse

    def plain(self, request: ForwardRequest, tensor: Tensor) -> ForwardRequest:
        return plain_forward(request, tensor)

    def emptied(self, request: ForwardRequest, slot: PushSlot) -> ForwardRequest:
        return emptied_forward(request, slot)
