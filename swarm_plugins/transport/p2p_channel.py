"""Channels over libp2p streams: a client opens them, a server accepts them.

Each rpc is a two-way stream of frames (wire.py). hivemind's typed servicers would wrap each frame in a protobuf
message, at two copies and a new task each, and trust an 8-byte length that the peer declares.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import cast

from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID, StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2

from swarm_plugins.errors import CapacityError, ConfigError, RequestTimeoutError, TransportError
from swarm_plugins.ledger import Ledger
from swarm_plugins.transport import limits
from swarm_plugins.transport.admission.addresses import ip_in
from swarm_plugins.transport.channel import RPC_NAMES, Handler, dial_error
from swarm_plugins.transport.counts import StreamCounts
from swarm_plugins.transport.messages import Codec, Failure, Message
from swarm_plugins.transport.receiving.allowances import Allowances
from swarm_plugins.transport.receiving.turnstile import Turnstile
from swarm_plugins.transport.stream import FrameStream

log = logging.getLogger(__name__)

# Increment it on incompatible changes: old and new peers then refuse each other's streams by name.
_PROTOCOL_VERSION = 1
_IDLE_S = 30.0
"""Streams that have waited for longer may be ended for peers that have none."""
_RESERVED_PART = 16
"""One stream of so many is for peers that have done something for this server."""
_END_CHECKS, _END_CHECK_S = 20, 0.01
_OUTLIVING = ("rpc_push", "rpc_adapter")
"""Rpcs whose requests are finished although the client has left: pushes are for others, and the thread that checks an
upload cannot be stopped."""


def protocol_name(rpc: str) -> str:
    """Returns the libp2p protocol id of an rpc; raises ConfigError if it is unknown."""
    if rpc not in RPC_NAMES:
        raise ConfigError(f"unknown rpc {rpc!r}: expected one of {', '.join(RPC_NAMES)}")
    return f"/swarm_plugins/{_PROTOCOL_VERSION}/{rpc}"


async def open_channel(
    socket_path: str,
    peer: str,
    protocol: str,
    *,
    timeout_s: float,
    ledger: Ledger,
    counts: StreamCounts | None = None,
) -> FrameStream:
    """Opens a stream to a peer through the daemon that listens on ``socket_path``.

    Raises:
        TransportError: If the peer cannot be reached or does not speak the protocol.
        RequestTimeoutError: If it does not answer within ``timeout_s``.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await open_stream(socket_path, peer, protocol)
            try:
                stream = FrameStream(peer, ledger, counts, allowances=Allowances())
                return await _take_over(stream, reader, writer)
            except BaseException:
                writer.transport.abort()
                raise
    except TimeoutError as exc:
        raise RequestTimeoutError(
            f"peer {peer} has not answered within {timeout_s:g} s: it is down, behind a firewall, or overloaded"
        ) from exc


async def open_stream(socket_path: str, peer: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Opens a bare stream to a peer through the daemon that listens on ``socket_path``.

    Raises:
        TransportError: If the peer cannot be reached or does not speak the protocol, or the daemon does not answer.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(socket_path)
        try:
            await _request_stream(reader, writer, peer, protocol)
        except BaseException:
            writer.transport.abort()
            raise
    except TransportError:
        # An OSError too, but about the peer; the daemon itself is fine.
        raise
    except (OSError, asyncio.IncompleteReadError) as exc:
        raise TransportError(
            f"no stream to peer {peer}: this machine's own libp2p daemon does not answer ({exc}); "
            "it has died or is shutting down"
        ) from exc
    return reader, writer


async def _request_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str, protocol: str) -> None:
    request = p2pd_pb2.Request(
        type=p2pd_pb2.Request.STREAM_OPEN,
        streamOpen=p2pd_pb2.StreamOpenRequest(peer=PeerID.from_base58(peer).to_bytes(), proto=[protocol]),
    )
    await write_pbmsg(writer, request)
    response = p2pd_pb2.Response()
    await read_pbmsg_safe(reader, response)
    if response.type == p2pd_pb2.Response.ERROR:
        if "protocols not supported" in response.error.msg:
            raise TransportError(f"peer {peer} does not serve {protocol}: protocols not supported")
        raise dial_error(peer, response.error.msg)


async def _take_over(stream: FrameStream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> FrameStream:
    # No await in between: at the marked end, reading returns the buffered bytes at once.
    reader.feed_eof()
    stream.attach(writer, await reader.read())
    return stream


class _Served(FrameStream):
    """The server's end of a stream, which notices if the client leaves while its request is processed.

    That is between a `receive` and the next `send` or `receive`. Decoding and encoding are not interrupted: the memory
    that their threads hold would no longer be counted.
    """

    on_lost: Callable[[], object] | None = None
    """Called then; None if requests are finished all the same."""
    _is_at_work = False

    async def send(self, message: Message, *, codec: Codec = "none") -> None:
        self._is_at_work = False
        await super().send(message, codec=codec)

    async def receive(self, *, timeout_s: float) -> Message | None:
        self._is_at_work = False
        message = await super().receive(timeout_s=timeout_s)
        if message is not None and self.on_lost is not None:
            self._check_usable()
            self._is_at_work = True
        return message

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._is_at_work and not self.is_closed and self.on_lost is not None:
            self.on_lost()


class Acceptor:
    """Turns incoming streams into calls of handlers, within limits per peer.

    Args:
        ledger: For messages that are not read yet; its groups share streams too.
        counts: Counts over all streams of the node.
        refusal: Returns why a peer may not call at all, or None.
    """

    def __init__(
        self,
        ledger: Ledger,
        counts: StreamCounts | None = None,
        refusal: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self._refusal = refusal
        self._ledger = ledger
        self._counts = counts or StreamCounts()
        self._streams = Ledger(
            limits.MAX_STREAMS,
            max_peer_share=limits.MAX_PEER_STREAM_SHARE,
            noun="streams",
            groups=ledger.groups,
            reserved=limits.MAX_STREAMS // _RESERVED_PART,
        )
        self._turnstile = Turnstile(ledger.group)
        self._open: set[FrameStream] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_streams(self) -> int:
        """Number of open streams of all peers."""
        return self._streams.used

    @property
    def served(self) -> set[str]:
        """Peers with open streams."""
        return {stream.remote_peer for stream in self._open}

    async def accept(
        self,
        rpc: str,
        handler: Handler,
        info: StreamInfo,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Serves one stream of an rpc until it ends."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._tasks.add(task)
        try:
            peer = info.peer_id.to_base58()
            max_tensors = limits.MAX_TENSORS if rpc == "rpc_adapter" else limits.MAX_REQUEST_TENSORS
            groups = self._ledger.groups
            address = ip_in(info.addr.to_bytes())
            with contextlib.nullcontext() if groups is None else groups.calling(peer, address):
                stream = _Served(
                    peer,
                    self._ledger,
                    self._counts,
                    turnstile=self._turnstile,
                    max_tensors=max_tensors,
                )
                if rpc not in _OUTLIVING:
                    stream.on_lost = task.cancel
                channel = await _take_over(stream, reader, writer)
                try:
                    await self._serve(handler, channel)
                finally:
                    await channel.close()
        except TransportError as exc:
            log.debug("a stream of peer %s ended: %s", info.peer_id, exc)
        except asyncio.CancelledError:
            # Not raised again: Python 3.11 reports the cancelled task of a stream as a fault.
            log.debug("a stream of peer %s was ended here", info.peer_id)
        finally:
            self._tasks.discard(task)

    async def close(self) -> None:
        """Cancels all handlers and waits for them to end."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, unfinished = await asyncio.wait(tasks, timeout=10.0)
            for task in unfinished:
                log.warning("a handler does not end: %s", task.get_name())

    async def _serve(self, handler: Handler, channel: FrameStream) -> None:
        refusal = self._refusal(channel.remote_peer)
        if refusal is not None:
            self._counts.refused["refused"] += 1
            await channel.send(Failure(kind="refused", message=refusal))
            return
        peer = channel.remote_peer
        try:
            if not self._streams.held(peer) and not self._streams.room(peer):
                await self._end_idlest(peer)
            self._streams.claim(peer, 1)
        except CapacityError as error:
            self._counts.refused["overloaded"] += 1
            await channel.send(Failure(kind="overloaded", message=str(error)))
            return
        self._open.add(channel)
        try:
            await _await_first_message(channel)
            await handler(channel)
        except TransportError:
            raise
        except Exception as exc:
            log.exception("a handler failed on a stream of peer %s", peer)
            text = f"the server failed ({type(exc).__name__}); its log says more"
            await channel.send(Failure(kind="internal", message=text))
        finally:
            self._open.discard(channel)
            self._streams.release(peer, 1)

    async def _end_idlest(self, peer: str) -> None:
        """Ends the stream that has waited longest for a request, to let in a peer that has none."""
        streams = self._streams
        # While some are free, only others of its address keep it out.
        is_full, group = not streams.free(peer), streams.group(peer)
        others = [one for one in self._open if is_full or streams.group(one.remote_peer) == group]
        # Only those whose end would let this peer in.
        others = [one for one in others if streams.room_after(peer, one.remote_peer, 1)]
        idlest = min(others, key=lambda stream: stream.waits_since, default=None)
        if idlest is None or asyncio.get_running_loop().time() - idlest.waits_since < _IDLE_S:
            return
        used = self._streams.used
        idlest.abort(TransportError("ended after a long silence, to let in another peer"))
        for _ in range(_END_CHECKS):
            if self._streams.used < used:
                return
            await asyncio.sleep(_END_CHECK_S)


async def _await_first_message(stream: FrameStream) -> None:
    """Waits for the first message as long as it keeps arriving; silence raises."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    while True:
        try:
            return await stream.wait(limits.FIRST_MESSAGE_TIMEOUT_S)
        except RequestTimeoutError:
            # A large message may take longer, but must not trickle in.
            if stream.received_bytes < (loop.time() - started) * limits.MIN_RECEIVE_BYTES_PER_S:
                raise
