"""Channels within this process, with the encoder and decoder of the network: both ends own their tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from swarm_plugins.errors import RequestTimeoutError, TransportError
from swarm_plugins.transport.channel import Channel, Handler, Transport
from swarm_plugins.transport.messages import Codec, Message
from swarm_plugins.transport.wire import decode, encode

_Frames = asyncio.Queue[bytes | None]


class _End:
    """One end of a stream; None in a queue is its end."""

    def __init__(self, remote_peer: str, outgoing: _Frames, incoming: _Frames) -> None:
        self.remote_peer = remote_peer
        self._outgoing = outgoing
        self._incoming = incoming
        self._is_closed = False

    async def send(self, message: Message, *, codec: Codec = "none") -> None:
        # Unpacked whatever the codec: nothing is saved here.
        if self._is_closed:
            raise TransportError(f"the channel to {self.remote_peer} is closed: open a new one")
        self._outgoing.put_nowait(b"".join(encode(message)))

    async def receive(self, *, timeout_s: float) -> Message | None:
        try:
            # Without `wait_for` if possible: with a timeout of 0 it gives up before it looks.
            is_there = not self._incoming.empty()
            frame = self._incoming.get_nowait() if is_there else await asyncio.wait_for(self._incoming.get(), timeout_s)
        except TimeoutError as exc:
            raise RequestTimeoutError(f"no message from {self.remote_peer} within {timeout_s:g} s") from exc
        if frame is None:
            self._incoming.put_nowait(None)
            return None
        return decode(frame)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._outgoing.put_nowait(None)
            self._incoming.put_nowait(None)


class LocalRoutes:
    """A transport that reaches peers of this process through memory, and others by another transport.

    Args:
        inner: Reaches the others.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._handlers: dict[str, Mapping[str, Handler]] = {}
        """By peer and rpc."""
        self._running: dict[asyncio.Task[None], str] = {}

    def serve(self, peer: str, handlers: Mapping[str, Handler]) -> None:
        """Serves a peer of this process from now on."""
        self._handlers[peer] = handlers

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        if peer not in self._handlers:
            return await self._inner.open(peer, rpc, timeout_s=timeout_s)
        forth: _Frames = asyncio.Queue()
        back: _Frames = asyncio.Queue()
        task = asyncio.create_task(_run(self._handlers[peer][rpc], _End(peer, back, forth)), name="serve this client")
        self._running[task] = peer
        task.add_done_callback(self._running.pop)
        return _End(peer, forth, back)

    def forget(self, peer: str) -> None:
        """Serves a peer of this process no more; its streams end by themselves."""
        self._handlers.pop(peer, None)

    async def end(self, peer: str) -> None:
        """Ends the streams of a peer of this process, which cannot be reached any more. Idempotent."""
        self.forget(peer)
        tasks = [task for task, name in self._running.items() if name == peer]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        await self._inner.close()


async def _run(handler: Handler, end: _End) -> None:
    try:
        await handler(end)
    finally:
        await end.close()
