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
from swarm_plugins.book import judging
from swarm_plugins.book.record import unkept_tokens
from swarm_plugins.client.answers import check_same_routers
from swarm_plugins.client.calls.retries import ChainRetries
from swarm_plugins.client.digests import CallAdapters
from swarm_plugins.client.splitting import chunk_rows, chunks_within, tokens_per_message
from swarm_plugins.client.training.chain import ChainCall
from swarm_plugins.errors import UnsupportedError
from swarm_plugins.rotary import do_rows_differ
from swarm_plugins.routing import Demand, SpanChoice

if TYPE_CHECKING:
    from swarm_plugins.client.servers import Servers

T = TypeVar("T")
_MOST_CHUNKS = 16
"""Through three servers, an eighth of the time is then filling and draining; twice as many would save half of it."""
_COUNTS = (2, 4, 8)
"""Numbers of chunks that are tried."""


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
        servers, inputs = self.servers, self.inputs
        retries = ChainRetries(servers.view)
        chains = await self._chains(retries)
        adapters = CallAdapters(servers.digests, inputs.adapters)
        rows = chunk_rows(inputs.hidden.shape[0], len(chains))
        parts = [inputs] if len(rows) == 1 else [inputs.take_rows(one) for one in rows]
        chunks = [ChainCall(servers, part, keep=self.keep, adapters=adapters) for part in parts]
        outputs = await _all(chunk.forward(retries, chain) for chunk, chain in zip(chunks, chains, strict=True))
        retries.succeeded()
        servers.peers.counts.passes["forward"] += 1
        check_same_routers(outputs, "the swarm")
        if self.keep:
            self._chunks = chunks
        return join_outputs(outputs, dim=0)

    async def _chains(self, retries: ChainRetries) -> list[Sequence[SpanChoice]]:
        """Returns a chain for each chunk."""
        view, inputs = self.servers.view, self.inputs
        num_rows, length = inputs.hidden.shape[:2]
        chain = await retries.chain(inputs.blocks, Demand(tokens=inputs.num_tokens))
        limit = tokens_per_message(inputs, backward=self.keep)
        least = chunks_within(inputs, min(view.most_tokens(inputs.blocks) or limit, limit))
        wanted = view.config.micro_batches
        if do_rows_differ(inputs.whole_beyond, inputs.position_ids):
            wanted = 1
            if least > 1:
                raise UnsupportedError(
                    f"{num_rows} rows of {length} tokens have to run at once, since some pass the border of LongRoPE "
                    f"at {inputs.whole_beyond} tokens and others do not, and do not fit in one message: give long "
                    "and short rows apart"
                )
        options = [max(least, min(wanted, num_rows))] if wanted != "auto" else self._options(chain, least)
        sizes = [[length * (one.stop - one.start) for one in chunk_rows(num_rows, count)] for count in options]
        found = view.schedule(inputs.blocks, sizes, without=retries.excluded) if options != [1] else None
        # Stand-ins for missing servers are in no schedule.
        return [chain] * options[0] if found is None else [*found.chains]

    def _options(self, chain: Sequence[SpanChoice], least: int) -> list[int]:
        """Returns the numbers of chunks to choose from, ascending; one while too little is known of the servers."""
        num_rows, length = self.inputs.hidden.shape[:2]
        book = self.servers.peers.book
        records = [book[span.peer] for span in chain]
        unkept = min(filter(None, (unkept_tokens(one, book.now) for one in records)), default=0) if self.keep else 0
        if unkept > length:
            # Half of it may fit; more chunks than that would help little.
            fitting = chunks_within(self.inputs, max(1, unkept // 2))
            least = max(least, fitting if fitting <= _MOST_CHUNKS else 1)
        if not all(judging.is_known(record) for record in records):
            return [least]
        most = max(least, min(_MOST_CHUNKS, num_rows))
        return [least, *(count for count in _COUNTS if least < count < most), *([most] if most > least else ())]

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
        self.servers.peers.counts.passes["backward"] += 1
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
