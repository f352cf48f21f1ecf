"""Steps that servers hand on to each other, so that a token crosses the network once per server and not twice."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from torch import Tensor

from swarm_plugins.block_io import LoadedAdapter
from swarm_plugins.client.handing import Handover, PostedInVainError, check_handed, excusing, feeding, started_s
from swarm_plugins.client.sessions.span_session import SpanSession
from swarm_plugins.errors import SwarmError, UnknownAdapterError, printable
from swarm_plugins.transport.admission.pushing import push_token
from swarm_plugins.transport.messages import PushTo, SessionStep, SessionStepResponse
from swarm_plugins.transport.pushed import emptied_step, plain_step

if TYPE_CHECKING:
    from swarm_plugins.client.discovery.view import Servers

_MAX_AHEAD = 8
"""Steps that a server has been told of, and has not answered; servers keep pushed inputs of so many."""

Named = tuple[SessionStep, tuple[LoadedAdapter, ...]]
"""A request and the adapters that it names."""


class _Sent(NamedTuple):
    """A request whose answer was not collected."""

    step: int
    """Of the session."""
    request: SessionStep
    adapters: tuple[LoadedAdapter, ...]
    is_last: bool


class PushedSteps:
    """Steps that a chain of servers is told of ahead of their inputs: one, or the chunks of a prompt.

    Args:
        spans: The open sessions, in order.
        servers: Who they are, and which hops have failed.
    """

    def __init__(self, spans: Sequence[SpanSession], servers: Servers) -> None:
        self._servers = servers
        self._before = dict(zip(spans[1:], spans, strict=False))
        self._after = dict(itertools.pairwise(spans))
        # Each session counts its steps by itself.
        self._leads = {one: two.num_steps - one.num_steps for one, two in itertools.pairwise(spans)}
        self._sent: dict[SpanSession, asyncio.Queue[_Sent | None]] = {one: asyncio.Queue(_MAX_AHEAD) for one in spans}
        """What each server was told, in order; after None, nothing more. A server that was given up is not in here."""
        self._fed: set[tuple[SpanSession, int]] = set()
        """Servers and steps whose input is believed to be there."""

    def receivers(self, current: SpanSession) -> list[str]:
        """Returns the servers that see a server's input or output: itself, and the one that gets its output."""
        after = self._after.get(current)
        return [current.peer] if after is None else [current.peer, after.peer]

    async def post(self, current: SpanSession, named: Named, *, is_last: bool) -> bool:
        """Tells a server of its next step; only the first server gets its input by that.

        Waits while the server has too many steps to answer. Returns whether it may be told of another one: not if it
        cannot be reached, or was given up.
        """
        queue = self._sent.get(current)
        if queue is None:
            return False
        request, adapters = named
        if current in self._before:
            request = emptied_step(request)
        step, after = current.num_steps, self._after.get(current)
        if after is not None and after in self._sent:
            number = step + self._leads[current]
            token = push_token(after.push_key, current.peer, number)
            to = PushTo(peer=after.peer, session=after.push_name, step=number, token=token)
            request = msgspec.structs.replace(request, push_to=to)
        try:
            await self._servers.peers.upload(current.peer, adapters)
            async with current.streaming() as channel:
                current.num_steps += 1
                await self._servers.peers.post(channel, request)
        except SwarmError:
            await queue.put(None)  # its session is lost, and that shows at its turn
            return False
        await queue.put(_Sent(step, request, adapters, is_last))
        return not is_last

    async def collect(
        self, current: SpanSession, hidden: Tensor
    ) -> tuple[SessionStep, tuple[LoadedAdapter, ...], SessionStepResponse] | None:
        """Returns a server's answer, with its request as if it had come from here; None if it was not told of that.

        The server gets its input, ``hidden``, from here if no other server sends it. After an error it is given up.

        Raises:
            PostedInVainError: If the server got something else, failed at what it got, or has dropped an adapter since
                it was uploaded. Its session is closed, but in the last case only if other steps follow this one.
            SwarmError: As for any step.
        """
        queue = self._sent.get(current)
        sent = None if queue is None else await queue.get()
        if sent is None:
            self.give_up(current)
            return None
        try:
            response = await self._answer(current, sent, hidden)
        except BaseException as exc:
            self.give_up(current)
            if not sent.is_last:
                await current.close()  # further steps are on their way to it
            if isinstance(exc, UnknownAdapterError):
                raise PostedInVainError(str(exc)) from exc
            raise
        after = self._after.get(current)
        if after is not None and sent.request.push_to is not None:
            if response.not_pushed:
                self._servers.peers.hops.failed(current.peer, after.peer, printable(response.not_pushed))
            else:
                self._fed.add((after, sent.request.push_to.step))
        return plain_step(sent.request, hidden), sent.adapters, response

    def give_up(self, current: SpanSession) -> None:
        """Tells a server of no more steps. Idempotent."""
        self._sent.pop(current, None)

    async def _answer(self, current: SpanSession, sent: _Sent, hidden: Tensor) -> SessionStepResponse:
        request, tokens, before = sent.request, hidden.shape[0] * hidden.shape[1], self._before.get(current)
        peers, blocks = self._servers.peers, len(current.blocks)
        way = None if before is None else Handover(before.peer, current.peer, current.push_name, sent.step)
        started: float | None = None
        async with contextlib.AsyncExitStack() as stack:
            channel = await stack.enter_async_context(current.streaming())
            if way is not None:
                is_sent = (current, sent.step) in self._fed
                started = started_s(self._servers, way, is_sent=is_sent)
                await stack.enter_async_context(feeding(self._servers, way, "rpc_session", hidden, is_sent=is_sent))
            await current.confirm(peers)
            if way is not None:
                stack.enter_context(excusing(self._servers, way))
            response = await peers.collect(
                channel, request, SessionStepResponse, work="rpc_session", units=tokens, blocks=blocks, started=started
            )
            if way is not None:
                check_handed(self._servers, way, response.input_hash, hidden)
        return response

    async def close(self) -> None:
        """Ends the sessions whose answers were not collected."""
        for current, queue in self._sent.items():
            if not queue.empty():
                await current.close()
        self._sent.clear()
