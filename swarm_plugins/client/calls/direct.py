"""Asks one server: in its turn, with the adapters that it lacks."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

from swarm_plugins.client.answers import OverloadedError
from swarm_plugins.client.calls.call import Answer, Call, Request, Response
from swarm_plugins.client.calls.pushing import outgoing, received
from swarm_plugins.errors import CapacityError
from swarm_plugins.transport.pushed import plain

if TYPE_CHECKING:
    from swarm_plugins.client.peers import Peers


class Direct:
    """Asks over the client's own streams; see `Caller`."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def ask(self, call: Call[Request, Response], peer: str) -> Answer[Request, Response]:
        """Asks a server when it has a place for the request, and again if it had none.

        Raises:
            TransportError: Also if another call has meanwhile found out that the server fails.
            SwarmError: As for any request.
        """
        record = self._peers.book.kept(peer)
        room = 0 if record.info is None else record.info.max_batch_tokens
        while True:
            async with record.backlog.turn(call.tokens, room=room) if call.is_queued else contextlib.nullcontext():
                call.check_wanted(peer)
                request = outgoing(call, peer)
                send = functools.partial(call.send, self._peers, peer, request)
                try:
                    response = await self._peers.with_adapters(peer, call.adapters, send)
                    break
                except (OverloadedError, CapacityError) as exc:
                    refusal = exc
            if not call.is_queued or not record.backlog.refused():
                raise refusal
        answer = Answer(peer, plain(request), response)
        received(call, answer)
        return answer
