"""Outputs that a server hands on to the next one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict

from torch import Tensor

from swarm_plugins.errors import SwarmError, one_line
from swarm_plugins.ledger import Charge
from swarm_plugins.transport.channel import Channel, Opener
from swarm_plugins.transport.messages import Codec, PushedHidden, PushTo

_MAX_STREAMS = 256
"""To other servers, each for a session; those unused for longest are closed."""
_CONNECT_S = 5.0
_MOMENT_S = 0.02
_MAX_WAITING = 16
"""Outputs of a session on their way to the next server: chunks of a prompt, which that one computes meanwhile."""
_PATIENCE_S = 2.0
"""How long an output waits for room behind others."""


class Pushes:
    """Sends outputs to other servers, over streams that are kept open.

    Args:
        opener: Opens streams; None: nothing can be sent.
    """

    def __init__(self, opener: Opener | None = None) -> None:
        self._opener = opener
        self._streams: OrderedDict[tuple[str, str], Channel] = OrderedDict()
        self._sending: dict[tuple[str, str], list[asyncio.Task[str]]] = {}
        self.num_taken = 0
        """Hidden states that others have pushed here."""
        self.num_refused = 0
        """Those that were refused."""

    @property
    def is_possible(self) -> bool:
        """Whether this server can reach others."""
        return self._opener is not None

    async def send(self, to: PushTo, hidden: Tensor, codec: Codec, charge: Charge) -> str:
        """Sends the output of a step to the next server; returns why that failed, or an empty string.

        What takes longer than a moment goes on alone, and is believed to arrive: the client, who gets the same output
        now, finds out by waiting for the next server. Until it has been sent it counts in ``charge``.
        """
        key = (to.peer, to.session)
        waiting = self._sending.get(key, [])
        if len(waiting) >= _MAX_WAITING:
            await asyncio.wait(waiting[:1], timeout=_PATIENCE_S)
        if len(waiting) >= _MAX_WAITING:
            return f"{len(waiting)} outputs of this session are still on their way"
        try:
            charge.claim(hidden.nbytes)
        except SwarmError as error:
            return one_line(error)
        message = PushedHidden(session=to.session, step=to.step, token=to.token, hidden=hidden)
        before = waiting[-1] if waiting else None
        task = asyncio.create_task(self._send(key, message, codec, before), name="push")
        waiting.append(task)
        self._sending[key] = waiting

        def end(_: object) -> None:
            waiting.remove(task)
            if not waiting:
                self._sending.pop(key, None)
            charge.release()

        task.add_done_callback(end)
        done, _ = await asyncio.wait({task}, timeout=_MOMENT_S)
        return task.result() if done else ""

    async def _send(
        self, key: tuple[str, str], message: PushedHidden, codec: Codec, before: asyncio.Task[str] | None
    ) -> str:
        if before is not None:
            await asyncio.wait({before})
        if self._opener is None:
            return "this server reaches no others"
        kept = self._streams.pop(key, None)
        if kept is not None:
            # It may have ended, as it does after a while without outputs: then a fresh one does.
            with contextlib.suppress(SwarmError):
                return await self._send_over(key, kept, message, codec)
        try:
            stream = await self._opener.open(key[0], "rpc_push", timeout_s=_CONNECT_S)
            return await self._send_over(key, stream, message, codec)
        except SwarmError as error:
            return one_line(error)

    async def _send_over(self, key: tuple[str, str], stream: Channel, message: PushedHidden, codec: Codec) -> str:
        try:
            await stream.send(message, codec=codec)
        except BaseException:
            # Also when cancelled: half of a message may have been sent.
            await _close(stream)
            raise
        self._streams[key] = stream
        while len(self._streams) > _MAX_STREAMS:
            await _close(self._streams.popitem(last=False)[1])
        return ""

    async def forget(self, to: PushTo) -> None:
        """Ends what is on its way to a session, and closes the stream."""
        key = (to.peer, to.session)
        for task in self._sending.get(key, ()):
            task.cancel()
        stream = self._streams.pop(key, None)
        if stream is not None:
            await _close(stream)


async def _close(stream: Channel) -> None:
    with contextlib.suppress(SwarmError):
        await stream.close()
