"""Channels over libp2p streams: the client's way to open one, the server's way to accept them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import cast

from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID, StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2

from swarm_plugins.errors import RequestTimeoutError, TransportError, one_line
from swarm_plugins.transport.channel import Handler
from swarm_plugins.transport.limits import WireLimits
from swarm_plugins.transport.messages import Codec, Failure, Message
from swarm_plugins.transport.stream import FrameStream, ReceiveBudget
from swarm_plugins.transport.wire import decode_body, encode

__all__ = ["Acceptor", "P2PChannel", "open_channel"]

log = logging.getLogger(__name__)


class P2PChannel:
    """A channel over one libp2p stream; see [`Channel`][swarm_plugins.transport.channel.Channel]."""

    def __init__(self, remote_peer: str, stream: FrameStream, limits: WireLimits) -> None:
        self._remote_peer = remote_peer
        self._stream = stream
        self._limits = limits

    @property
    def remote_peer(self) -> str:
        """Base58 id of the peer at the other end, proved by libp2p's handshake."""
        return self._remote_peer

    @property
    def stream(self) -> FrameStream:
        """What carries the frames."""
        return self._stream

    async def send(self, message: Message, *, codec: Codec = "none") -> None:
        """Sends one message; see `Channel.send`."""
        await self._stream.write(encode(message, codec=codec))

    async def receive(self, *, timeout_s: float) -> Message | None:
        """Receives the next message; see `Channel.receive`."""
        frame = await self._stream.read(timeout_s)
        return None if frame is None else decode_body(frame.header, frame.body, self._limits)

    async def close(self) -> None:
        """Closes the stream. Idempotent."""
        self._stream.close()


async def open_channel(
    socket_path: str, peer: str, protocol: str, *, timeout_s: float, limits: WireLimits, budget: ReceiveBudget
) -> P2PChannel:
    """Opens a stream to a peer through the daemon that listens on ``socket_path``.

    Raises:
        TransportError: If the peer cannot be reached or does not speak the protocol.
        RequestTimeoutError: If it does not answer within ``timeout_s``.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(socket_path)
            try:
                await _request_stream(reader, writer, peer, protocol)
                return await _take_over(peer, reader, writer, limits, budget)
            except BaseException:
                writer.transport.abort()
                raise
    except TimeoutError as exc:
        raise RequestTimeoutError(
            f"peer {peer} has not answered within {timeout_s:g} s: it is down, behind a firewall, or overloaded"
        ) from exc
    except TransportError:
        # An OSError too, but what the daemon said of the peer; the daemon itself is well.
        raise
    except (OSError, asyncio.IncompleteReadError) as exc:
        raise TransportError(
            f"no stream to peer {peer}: this machine's own libp2p daemon does not answer ({exc}); "
            "it has died or is shutting down"
        ) from exc


async def _request_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str, protocol: str) -> None:
    request = p2pd_pb2.Request(
        type=p2pd_pb2.Request.STREAM_OPEN,
        streamOpen=p2pd_pb2.StreamOpenRequest(peer=PeerID.from_base58(peer).to_bytes(), proto=[protocol]),
    )
    await write_pbmsg(writer, request)
    response = p2pd_pb2.Response()
    await read_pbmsg_safe(reader, response)
    if response.type == p2pd_pb2.Response.ERROR:
        raise TransportError(f"peer {peer} cannot be reached for {protocol}: {response.error.msg}")


async def _take_over(
    peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: WireLimits, budget: ReceiveBudget
) -> P2PChannel:
    stream = FrameStream(peer, limits, budget)
    # Nothing yields between these two lines: with the end marked, reading returns what is buffered at once.
    reader.feed_eof()
    already_read = await reader.read()
    stream.attach(writer, already_read)
    return P2PChannel(peer, stream, limits)


class Acceptor:
    """Turns incoming streams into calls of handlers, within limits per peer."""

    def __init__(self, limits: WireLimits, budget: ReceiveBudget) -> None:
        self._limits = limits
        self._budget = budget
        self._streams: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_streams(self) -> int:
        """Streams held open by all peers."""
        return self._streams.total()

    async def accept(
        self, handler: Handler, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serves one stream to its end."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._tasks.add(task)
        try:
            channel = await _take_over(info.peer_id.to_base58(), reader, writer, self._limits, self._budget)
            async with _closing(channel):
                await self._serve(handler, channel)
        except TransportError as exc:
            log.debug("a stream of peer %s ended: %s", info.peer_id, exc)
        except asyncio.CancelledError:
            # The last frame of the stream's own task: Python 3.11 reports a cancelled one as a fault.
            log.debug("a stream of peer %s was ended here", info.peer_id)
        finally:
            self._tasks.discard(task)

    async def close(self) -> None:
        """Cancels all handlers and waits for their end."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, unfinished = await asyncio.wait(tasks, timeout=10.0)
            for task in unfinished:
                log.warning("a handler does not end: %s", task.get_name())

    async def _serve(self, handler: Handler, channel: P2PChannel) -> None:
        refusal = self._refusal(channel.remote_peer)
        if refusal is not None:
            await channel.send(Failure(kind="overloaded", message=refusal))
            return
        with self._counted(channel.remote_peer):
            await _await_first_message(channel, self._limits)
            try:
                await handler(channel)
            except TransportError:
                raise
            except Exception as exc:
                log.exception("a handler failed on a stream of peer %s", channel.remote_peer)
                await channel.send(Failure(kind="internal", message=one_line(exc, with_kind=True)))

    def _refusal(self, peer: str) -> str | None:
        if self._streams[peer] >= self._limits.max_streams_per_peer:
            return (
                f"peer {peer} holds {self._streams[peer]} streams here, allowed are "
                f"{self._limits.max_streams_per_peer}: close idle sessions"
            )
        if self.num_streams >= self._limits.max_streams:
            return (
                f"{self.num_streams} streams are open here, allowed are {self._limits.max_streams}: try another server"
            )
        return None

    @contextlib.contextmanager
    def _counted(self, peer: str) -> Iterator[None]:
        self._streams[peer] += 1
        try:
            yield
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]


@contextlib.asynccontextmanager
async def _closing(channel: P2PChannel) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await channel.close()


async def _await_first_message(channel: P2PChannel, limits: WireLimits) -> None:
    """Waits until the first message is there, as long as it keeps arriving; silence ends the stream."""
    stream = channel.stream
    loop = asyncio.get_running_loop()
    started = loop.time()
    while True:
        try:
            frame = await stream.read(limits.first_message_timeout_s)
        except RequestTimeoutError:
            # A large message may take longer, but not at a trickle.
            if stream.received_bytes < (loop.time() - started) * limits.min_receive_bytes_per_s:
                raise
        else:
            if frame is not None:
                stream.put_back(frame)
            return
