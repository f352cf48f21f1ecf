"""One generation stream over a chain: a session on every server, queued cache changes, replay on failure.

The client keeps what it has sent to each span. When a server is lost, another one gets the same inputs again, so the
tokens that follow are the same as without the loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from swarm_plugins.block_io import CacheOp, SpanInputs, SpanOutputs
from swarm_plugins.client.calls.retries import ChainRetries
from swarm_plugins.client.sessions.history import History
from swarm_plugins.client.sessions.pipe import Pipe
from swarm_plugins.client.sessions.replacing import faster, planned
from swarm_plugins.client.sessions.span import SpanSession
from swarm_plugins.errors import SwarmError
from swarm_plugins.routing import Demand

if TYPE_CHECKING:
    from swarm_plugins.client.servers import Servers

_CANCEL_S = 5.0
"""Longest wait for a cancelled step to end."""


class ClientSession:
    """A KV cache that lives on the servers of one chain; raises like `ChainCall`."""

    def __init__(self, servers: Servers, *, blocks: range, prefix: Sequence[Tensor] = ()) -> None:
        self.servers = servers
        self.blocks = blocks
        # Copied, as each step is: the caller may change it before it is replayed.
        self.prefix = tuple(tensor.detach().clone() for tensor in prefix)
        """Keys and values the cache starts with, K then V for each block."""
        self._spans: list[SpanSession] = []
        self._running: asyncio.Task[Any] | None = None
        self._is_closed = False

    @property
    def peers(self) -> tuple[str, ...]:
        """Ids of the servers that hold the cache, in the chain's order."""
        return tuple(span.peer for span in self._spans)

    async def step(self, inputs: SpanInputs, ops: Sequence[CacheOp] = ()) -> SpanOutputs:
        """Applies queued cache changes, then runs new tokens through the chain.

        If it raises, the changes stay in the cache and the new tokens do not: the step can be tried again.
        """
        self._running = asyncio.current_task()
        try:
            return await self._step(inputs, ops)
        finally:
            self._running = None
            if self._is_closed:
                # `close()` may have stopped waiting for this step, which has put its spans back.
                await self._close_spans()

    async def _step(self, inputs: SpanInputs, ops: Sequence[CacheOp]) -> SpanOutputs:
        if self._is_closed:
            # It would open sessions that nothing closes.
            raise SwarmError("this session is closed: start with a new cache")
        self._apply(ops)
        inputs = inputs.map(lambda tensor: tensor.detach().clone())
        retries = ChainRetries(self.servers.view)
        if not self._spans:
            rows, tokens = inputs.hidden.shape[:2]
            start = History(self.prefix)
            demand = Demand(tokens=rows * tokens, kv_tokens=rows * (start.length + tokens), kv_rows=rows)
            self._spans = await planned(self.servers, self.blocks, demand, start, retries)
        cached = self._spans[0].history.length
        pipe = Pipe(self.servers, self._spans, inputs, cached, retries)
        try:
            try:
                outputs = await pipe.run()
            finally:
                self._spans = pipe.spans
            retries.succeeded()
            self.servers.peers.counts.passes["step"] += 1
            await self._leave_slow(inputs.hidden.shape[0])
        except BaseException:
            # Also when interrupted: the first spans may already have the new tokens, or all of them.
            for current in self._spans:
                current.crop(cached)
            raise
        return outputs

    def _apply(self, ops: Sequence[CacheOp]) -> None:
        for current in self._spans:
            current.apply(ops)
        if not self._spans:
            # Nothing has run yet, or the first step failed: there is only a prefix to change.
            start = History(self.prefix)
            for op in ops:
                start.apply(op)
            self.prefix = start.prefix

    async def _leave_slow(self, rows: int) -> None:
        """Moves the session on a server that has become slow to clearly faster ones, if there are any."""
        view = self.servers.view
        due = [current for current in self._spans if current.is_due]
        if due and view.is_stale:
            # No token waits for servers to say what they serve now: the next comparison knows.
            view.refresh_in_background()
            return
        for current in due:
            parts = await faster(self.servers, current, self._spans, rows)
            if parts is not None:
                position = self._spans.index(current)
                self._spans[position : position + 1] = parts

    async def fork(self) -> ClientSession:
        """Returns an independent session with the same cache; servers copy theirs."""
        other = ClientSession(self.servers, blocks=self.blocks, prefix=self.prefix)
        try:
            for current in self._spans:
                twin = SpanSession(self.servers, current.peer, current.blocks, current.history.copy())
                other._spans.append(twin)
                if current.channel is not None and current.history.length:
                    # If the copy fails, the twin replays its history at its first step.
                    try:
                        await twin.open(current.history.batch_size, fork_of=current)
                        await twin.confirm()  # before the source takes its next step
                        twin.unsent_ops = list(current.unsent_ops)
                    except SwarmError:
                        await twin.close()
        except BaseException:
            # Interrupted: nothing will ever close the copies made so far.
            await other.close()
            raise
        return other

    async def close(self) -> None:
        """Closes the sessions on all servers; a step under way is cancelled. Idempotent."""
        self._is_closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running], timeout=_CANCEL_S)
        await self._close_spans()

    async def _close_spans(self) -> None:
        spans, self._spans = self._spans, []
        for current in spans:
            await current.close()
