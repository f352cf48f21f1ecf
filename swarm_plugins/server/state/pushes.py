"""Outputs that a server hands on to the next one."""

from __future__ import annotations

import contextlib
from collections import OrderedDict

from torch import Tensor

from swarm_plugins.errors import SwarmError
from swarm_plugins.transport.channel import Channel, Opener
from swarm_plugins.transport.messages import Codec, PushedHidden, PushTo

_MAX_STREAMS = 256
"""To other servers, each for a session; those unused for longest are closed."""
_CONNECT_S = 5.0


class Pushes:
    """Sends outputs to other servers, over streams that are kept open.

    Args:
        opener: Opens streams; None: nothing can be sent.
    """

    def __init__(self, opener: Opener | None = None) -> None:
        self._opener = opener
        self._streams: OrderedDict[tuple[str, str], Channel] = OrderedDict()
        self.num_taken = 0
        """Hidden states that others have pushed here."""
        self.num_refused = 0
        """Those that were refused."""

    @property
    def is_possible(self) -> bool:
        """Whether this server can reach others."""
        return self._opener is not None

    async def send(self, to: PushTo, hidden: Tensor, codec: Codec) -> str:
        """Sends the output of a step to the next server; returns why that failed, or an empty string."""
        if self._opener is None:
            return "this server reaches no others"
        message = PushedHidden(session=to.session, step=to.step, token=to.token, hidden=hidden)
        key = (to.peer, to.session)
        stream = self._streams.pop(key, None)
        try:
            if stream is None:
                stream = await self._opener.open(to.peer, "rpc_push", timeout_s=_CONNECT_S)
            await stream.send(message, codec=codec)
        except SwarmError as error:
            if stream is not None:
                await _close(stream)
            return str(error)
        self._streams[key] = stream
        while len(self._streams) > _MAX_STREAMS:
            await _close(self._streams.popitem(last=False)[1])
        return ""

    async def forget(self, session: str) -> None:
        """Closes the streams for a session of another server."""
        for key in [key for key in self._streams if key[1] == session]:
            await _close(self._streams.pop(key))


async def _close(stream: Channel) -> None:
    with contextlib.suppress(SwarmError):
        await stream.close()
