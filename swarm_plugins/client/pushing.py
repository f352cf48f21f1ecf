"""Steps that servers hand on to each other, so that a token crosses the network once per server and not twice."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import msgspec
from torch import Tensor

from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.client.hops import Hops
from swarm_plugins.client.peers import Peers
from swarm_plugins.client.span_session import SpanSession
from swarm_plugins.errors import SwarmError, printable
from swarm_plugins.transport.admission.pushing import plain_step, push_token
from swarm_plugins.transport.messages import PushedHidden, PushTo, SessionStep, SessionStepResponse
from swarm_plugins.transport.receipts import tensor_hash

_PATIENCE_S = 2.0
"""A server that has not answered so long after the one before it gets its input from here, too."""
_WORTH_S = 0.003
"""Round trip to the farthest server from which pushing saves more time than its messages take."""


class OtherInputError(SwarmError):
    """A server has computed with hidden states that are not those its predecessor has told the client."""


class _Sent(NamedTuple):
    """A request whose answer was not collected."""

    request: SessionStep
    adapters: tuple[LoadedAdapter, ...]
    """Those that it names."""
    after: SpanSession | None
    """Who gets the output."""


class PushedStep:
    """One step that was sent to servers ahead of its input.

    Args:
        peers: Sends.
        hops: Remembers what failed.
    """

    def __init__(self, peers: Peers, hops: Hops) -> None:
        self._peers = peers
        self._hops = hops
        self._sent: dict[SpanSession, _Sent] = {}
        self._senders: dict[SpanSession, str] = {}
        """Who was asked to send their input."""
        self._fed: set[SpanSession] = set()
        """Those who have it."""

    def is_waiting(self, current: SpanSession) -> bool:
        """Returns whether a server has the step, and its answer was not collected."""
        return current in self._sent

    async def post(
        self, spans: Sequence[SpanSession], requests: Sequence[tuple[SessionStep, tuple[LoadedAdapter, ...]]]
    ) -> None:
        """Sends the requests of consecutive spans, each with the adapters it names; only the first has its input.

        A server that cannot be reached is left out: its session is lost.
        """
        for current, (request, adapters), after in zip(spans, requests, [*spans[1:], None], strict=True):
            posted = request
            if current is not spans[0]:
                posted = msgspec.structs.replace(
                    posted, hidden=request.hidden[:, :, :0], pushed_bytes=request.hidden.nbytes
                )
            if after is not None:
                token = push_token(after.push_key, current.peer, after.num_steps)
                to = PushTo(peer=after.peer, session=after.name, step=after.num_steps, token=token)
                posted = msgspec.structs.replace(posted, push_to=to)
                self._senders[after] = current.peer
            with contextlib.suppress(SwarmError):
                async with current.streaming() as channel:
                    current.num_steps += 1
                    await self._peers.post(channel, posted, codec=self._peers.config.codec)
                self._sent[current] = _Sent(posted, adapters, after)
        self._fed.add(spans[0])

    async def collect(
        self, current: SpanSession, hidden: Tensor
    ) -> tuple[SessionStep, tuple[LoadedAdapter, ...], SessionStepResponse]:
        """Returns a server's answer, with its request as if it had come from here, and the adapters that names.

        The server gets its input, ``hidden``, from here if no other server sends it.

        Raises:
            OtherInputError: If the server got something else; its session is closed.
            SwarmError: As for any step.
        """
        request, adapters, after = self._sent.pop(current)
        tokens = hidden.shape[0] * hidden.shape[1]
        async with current.streaming() as channel, self._feeding(current, hidden):
            response = await self._peers.collect(
                channel, request, SessionStepResponse, work="rpc_session", units=tokens, blocks=len(current.blocks)
            )
        if request.pushed_bytes and response.input_hash != tensor_hash(hidden):
            # One of the two lies, or a way between them is broken. Its answer is right for what it got.
            self._hops.failed(self._senders[current], current.peer, "it has got other hidden states")
            await current.close()
            raise OtherInputError(f"server {current.peer} has got other hidden states than this client")
        if after is not None and response.not_pushed:
            self._hops.failed(current.peer, after.peer, printable(response.not_pushed))
        elif after is not None:
            self._fed.add(after)
        return plain_step(request, hidden), adapters, response

    @contextlib.asynccontextmanager
    async def _feeding(self, current: SpanSession, hidden: Tensor) -> AsyncIterator[None]:
        """Sends a server its input: at once if nobody else will, or if it is late."""
        step = current.num_steps - 1

        async def feed_late() -> None:
            if current in self._fed:
                await asyncio.sleep(_PATIENCE_S)
                self._hops.failed(self._senders[current], current.peer, "its input has not arrived in time")
            await self._feed(current, step, hidden)

        if current not in self._senders:
            yield
            return
        feeding = asyncio.create_task(feed_late())
        try:
            yield
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def _feed(self, current: SpanSession, step: int, hidden: Tensor) -> None:
        message = PushedHidden(session=current.name, step=step, hidden=hidden)
        with contextlib.suppress(SwarmError):
            channel = await self._peers.open(current.peer, "rpc_push")
            try:
                await self._peers.post(channel, message, codec=self._peers.config.codec)
            finally:
                await channel.close()

    async def close(self) -> None:
        """Ends the sessions whose answers were not collected."""
        for current in self._sent:
            await current.close()
        self._sent.clear()


def may_push(spans: Sequence[SpanSession], hops: Hops) -> bool:
    """Returns whether each server can get its input from the one before."""
    if len(spans) < 2 or any(current.channel is None for current in spans):
        return False
    pairs = itertools.pairwise(spans)
    return all(two.push_key and hops.is_open(one.peer, two.peer) for one, two in pairs)


def is_worth_it(round_trips_s: Sequence[float | None]) -> bool:
    """Returns whether servers at these distances should push: it saves time that messages need, not that of computing.

    The way from one server to another is at most as long as that from one to the client and on to the other.
    """
    return max((known for known in round_trips_s if known is not None), default=0.0) >= _WORTH_S
