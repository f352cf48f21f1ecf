"""Outputs that a server hands on to the next one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from swarm_plugins.errors import CapacityError, SwarmError, one_line
from swarm_plugins.ledger import Charge, Groups, Ledger
from swarm_plugins.transport.channel import Channel, Opener
from swarm_plugins.transport.messages import Codec, PushedHidden, PushTo

_MAX_STREAMS = 256
"""To other servers, each for a client's session, or for its slots; those unused for longest are closed."""
_MAX_STREAM_SHARE = 0.25
"""Share of them that one client may have; less when others have many."""
_MAX_RECEIVERS = 16
"""Servers to which this one hands on the outputs of one client: whoever may name any peer could have all called."""
_CONNECT_S = 5.0
_SEND_S = 30.0
"""For one output, connecting included. A server waits no longer for its input: see `SESSION_LEASE_S`."""
_MOMENT_S = 0.02
_MAX_WAITING = 16
"""Outputs of a session on their way to the next server: chunks of a prompt, which that one computes meanwhile."""
_PATIENCE_S = 2.0
"""How long an output waits for room behind others."""


class _Destination(NamedTuple):
    client: str
    """Whose outputs: others may use the same names."""
    peer: str
    session: str


@dataclass(eq=False)
class _Way:
    """Leads to a destination."""

    stream: Channel | None = None
    """None: not yet, or in use."""
    sending: list[asyncio.Task[str]] = field(default_factory=list)


class Pushes:
    """Sends outputs to other servers, over streams that are kept open.

    Args:
        opener: Opens streams; None: nothing can be sent.
        groups: Which clients share what they may have. None: each counts by itself.
    """

    def __init__(self, opener: Opener | None = None, groups: Groups | None = None) -> None:
        self._opener = opener
        self._ledger = Ledger(
            _MAX_STREAMS, max_peer_share=_MAX_STREAM_SHARE, noun="streams to other servers", groups=groups
        )
        self._ways: OrderedDict[_Destination, _Way] = OrderedDict()
        """The one used last at the end."""
        self._closing: set[asyncio.Task[None]] = set()
        self.num_taken = 0
        """Hidden states that others have pushed here."""
        self.num_refused = 0
        """Those that were refused."""

    async def send(self, client: str, to: PushTo, hidden: Tensor, codec: Codec, charge: Charge) -> str:
        """Sends the output of a client's step to the next server; returns why that failed, or an empty string.

        What takes longer than a moment goes on alone, and is believed to arrive: the client, who gets the same output
        now, finds out by waiting for the next server. Until it has been sent it counts in ``charge``.
        """
        destination = _Destination(client, to.peer, to.session)
        way = self._ways.get(destination)
        if way is not None and len(way.sending) >= _MAX_WAITING:
            await asyncio.wait(way.sending[:1], timeout=_PATIENCE_S)
        try:
            charge.claim(hidden.nbytes)
            way = self._way(destination)
        except SwarmError as error:
            charge.release()
            return one_line(error)
        sending, message = way.sending, PushedHidden(session=to.session, step=to.step, token=to.token, hidden=hidden)
        task = asyncio.create_task(
            self._send(destination.peer, way, message, codec, sending[-1] if sending else None), name="push"
        )
        sending.append(task)

        def end(_: object) -> None:
            sending.remove(task)
            charge.release()
            if not sending and way.stream is None and self._ways.get(destination) is way:
                self._drop(destination)

        task.add_done_callback(end)
        done, _ = await asyncio.wait({task}, timeout=_MOMENT_S)
        if task.cancelled():
            return "the session has ended before its output was sent"
        return task.result() if done else ""

    def _way(self, destination: _Destination) -> _Way:
        """Returns the way to a destination, with room for one more output.

        Raises:
            CapacityError: If it has none, or if there is no room for a new way.
        """
        way = self._ways.get(destination)
        if way is None:
            self._make_room(destination)
            way = self._ways[destination] = _Way()
        elif len(way.sending) >= _MAX_WAITING:
            raise CapacityError(f"{len(way.sending)} outputs of this session are still on their way")
        self._ways.move_to_end(destination)
        return way

    def _make_room(self, destination: _Destination) -> None:
        """Counts one more way, for which it closes streams that are not in use."""
        while True:
            mine = [other for other in self._ways if other.client == destination.client]
            try:
                if len({destination.peer, *(other.peer for other in mine)}) > _MAX_RECEIVERS:
                    raise CapacityError(
                        f"this client has streams to other servers, {_MAX_RECEIVERS} of them: there can be no more"
                    )
                self._ledger.claim(destination.client, 1)
            except CapacityError:
                # Others give way only to a client's first stream, and only if all are taken.
                others = [] if mine or self._ledger.free(destination.client) else list(self._ways)
                idle = next((other for other in mine or others if not self._ways[other].sending), None)
                if idle is None:
                    raise
                self._drop(idle)
            else:
                return

    def _drop(self, destination: _Destination) -> None:
        way = self._ways.pop(destination)
        self._ledger.release(destination.client, 1)
        for task in way.sending:
            task.cancel()
        if way.stream is not None:
            closing = asyncio.create_task(_close(way.stream), name="close a stream for pushes")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _send(
        self, peer: str, way: _Way, message: PushedHidden, codec: Codec, before: asyncio.Task[str] | None
    ) -> str:
        if before is not None:
            await asyncio.wait({before})
        if self._opener is None:
            return "this server reaches no others"
        try:
            async with asyncio.timeout(_SEND_S):
                kept, way.stream = way.stream, None
                if kept is not None:
                    # It may have ended, as it does after a while without outputs: then a fresh one does.
                    with contextlib.suppress(SwarmError):
                        return await _send_over(way, kept, message, codec)
                stream = await self._opener.open(peer, "rpc_push", timeout_s=_CONNECT_S)
                return await _send_over(way, stream, message, codec)
        except SwarmError as error:
            return one_line(error)
        except TimeoutError:
            return f"it was not sent within {_SEND_S:g} s"

    def forget(self, client: str, to: PushTo) -> None:
        """Ends what is on its way to a session, and closes the stream."""
        destination = _Destination(client, to.peer, to.session)
        if destination in self._ways:
            self._drop(destination)


async def _send_over(way: _Way, stream: Channel, message: PushedHidden, codec: Codec) -> str:
    try:
        await stream.send(message, codec=codec)
    except BaseException:
        # Also when cancelled: half of a message may have been sent.
        await _close(stream)
        raise
    way.stream = stream
    return ""


async def _close(stream: Channel) -> None:
    with contextlib.suppress(SwarmError):
        await stream.close()
