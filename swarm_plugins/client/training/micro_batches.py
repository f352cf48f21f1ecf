"""A batch cut along its rows into chunks that go through the chain at the same time, so that all of its servers work.

Pipelining as in Huang et al. 2019, "GPipe", section 2.3: of ``C`` chunks through ``N`` servers the last one ends after
``C + N - 1`` steps instead of ``N C``.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from swarm_plugins.block_io import SpanInputs, SpanOutputs, join_outputs
from swarm_plugins.client.answers import check_same_routers
from swarm_plugins.client.digests import CallAdapters
from swarm_plugins.client.retries import ChainRetries
from swarm_plugins.client.splitting import chunks_within, cut_rows, tokens_per_message
from swarm_plugins.client.training.chain_call import ChainCall
from swarm_plugins.routing import Demand

if TYPE_CHECKING:
    from swarm_plugins.client.discovery.view import Servers

T = TypeVar("T")


class BatchCall:
    """Runs blocks for one batch; raises MissingBlocksError without servers, SwarmError after too many failures.

    A failure of a server is one failure, however many chunks were under way there.
    """

    def __init__(self, servers: Servers, inputs: SpanInputs, *, keep: bool) -> None:
        self.servers = servers
        self.inputs = inputs
        self.keep = keep
        """Whether a backward will follow."""
        self._chunks: list[ChainCall] = []

    async def forward(self) -> SpanOutputs:
        """Runs the blocks."""
        retries = ChainRetries(self.servers.view)
        inputs = cut_rows(self.inputs, await self._num_chunks())
        adapters = CallAdapters(self.servers.digests, self.inputs.adapters)
        chunks = [ChainCall(self.servers, one, keep=self.keep, adapters=adapters) for one in inputs]
        chain = await retries.chain(self.inputs.blocks, Demand(tokens=inputs[0].num_tokens))
        outputs = await _all(chunk.forward(retries, chain) for chunk in chunks)
        retries.succeeded()
        check_same_routers(outputs, "the swarm")
        if self.keep:
            self._chunks = chunks
        return join_outputs(outputs, dim=0)

    async def _num_chunks(self) -> int:
        view, rows = self.servers.view, self.inputs.hidden.shape[0]
        if not view.known.infos:
            await view.refresh(force=False)
        limit = tokens_per_message(self.inputs)
        least = chunks_within(self.inputs, min(view.max_batch_tokens(self.inputs.blocks) or limit, limit))
        wanted = view.config.micro_batches
        return least if wanted == "auto" else max(least, min(wanted, rows))

    async def backward(self, grads: SpanOutputs, *, needs_hidden: bool, needs: Sequence[bool]) -> list[Tensor | None]:
        """Returns the gradients of hidden states, adapter tensors and prefix, in this order.

        ``grads`` holds the outputs' gradients; ``needs`` says for each tensor of adapters and prefix if its gradient
        is wanted.
        """
        retries = ChainRetries(self.servers.view)
        first = 0
        calls = []
        for chunk in self._chunks:
            rows = slice(first, first + chunk.inputs.hidden.shape[0])
            share = grads if len(self._chunks) == 1 else grads.take_rows(rows)
            calls.append(chunk.backward(share, needs_hidden=needs_hidden, needs=needs, retries=retries))
            first = rows.stop
        found = await _all(calls)
        retries.succeeded()
        if len(found) == 1:
            return found[0]
        end = 1 + len(self.inputs.adapters.tensors)
        columns = [[one for one in column if one is not None] for column in zip(*found, strict=True)]
        # Summed in the order of the rows, whichever answer came first: the same bits each time.
        return [
            None if not column else functools.reduce(torch.add, column) if 1 <= index < end else torch.cat(column)
            for index, column in enumerate(columns)
        ]


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of calls that run at the same time; the first to fail ends the others."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
