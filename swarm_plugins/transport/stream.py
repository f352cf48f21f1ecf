"""A channel over one byte stream (a socket of the libp2p daemon) that carries messages as frames.

Bytes are received directly into the memory the tensors will own: one system call and no copy for a message of usual
size, no task per message. Memory grows as bytes arrive, never by what a peer merely declares.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, cast

from torch import Tensor

from swarm_plugins.errors import CapacityError, ProtocolError, RequestTimeoutError, TransportError
from swarm_plugins.ledger import Ledger
from swarm_plugins.transport import limits
from swarm_plugins.transport.counts import StreamCounts
from swarm_plugins.transport.messages import Codec, Message
from swarm_plugins.transport.receiving.allowances import Allowances, unpacking_claim
from swarm_plugins.transport.receiving.arriving import fill, receive_body
from swarm_plugins.transport.receiving.pace import Pace
from swarm_plugins.transport.receiving.turnstile import Turnstile
from swarm_plugins.transport.receiving.waiter import Waiter
from swarm_plugins.transport.wire import END_FRAME, HEADER_BYTES, FrameHeader, decoded, encoded, parse_header

_STAGING_BYTES = 64 * 1024
_SLICE_BYTES = 256 * 1024
_JOIN_BYTES = 64 * 1024
_MAX_WAITING_FRAMES = 2
_PART_TIMEOUT_S = 15.0
_MAX_PARTING = 256


class Frame(NamedTuple):
    """A message as it arrived."""

    header: FrameHeader
    body: Tensor
    """Flat ``uint8``, owned by the receiver of the frame."""
    tensor_bytes: int | None = None
    """Most bytes of its tensors, if that is known."""


class FrameStream(asyncio.BufferedProtocol):
    """A [`Channel`][swarm_plugins.transport.channel.Channel] over one stream, and asyncio's protocol object of it.

    Args:
        peer: Id of the peer at the other end.
        ledger: Counts the memory of messages.
        counts: Counts over all streams of the node.
        turnstile: At a server's end, lets messages be decoded; a message then counts until the next one is read, as
            long as its request is worked on. None, at a client's: it belongs to the reader as soon as it is read.
        allowances: Bounds the answers, at a client's end. None: only `MAX_MESSAGE_BYTES` does.
        max_tensors: Most tensors of a message.
    """

    def __init__(
        self,
        peer: str,
        ledger: Ledger,
        counts: StreamCounts | None = None,
        *,
        turnstile: Turnstile | None = None,
        allowances: Allowances | None = None,
        max_tensors: int = limits.MAX_TENSORS,
    ) -> None:
        self.remote_peer = peer
        self._max_tensors = max_tensors
        self._ledger = ledger
        self._counts = counts or StreamCounts()
        self._turnstile = turnstile
        self._allowances = allowances
        self._charge = ledger.charge(peer)
        self._loop = asyncio.get_running_loop()
        self._writer: asyncio.StreamWriter | None = None
        self._transport: asyncio.Transport | None = None
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._unparsed = memoryview(b"")
        """Bytes behind as many frames as may wait."""
        self._pace = Pace(self._loop, is_paused=lambda: self._is_reading_paused, give_up=self._blame)
        self._frames: deque[Frame | CapacityError] = deque()
        self._receiver = Waiter()
        self._sender = Waiter()
        self._is_reading_paused = False
        self._is_writing_paused = False
        self._error: TransportError | None = None
        self._has_ended = False
        self.is_closed = False
        self.is_answered = False
        """Whether a message was received after the last one that was sent."""
        self._is_parting = False
        self.received_bytes = 0
        self.waits_since = math.inf
        """When the wait for the next message has begun; infinity while none is awaited."""
        self._parser = self._parse()
        self._wanted = next(self._parser)
        """The memory for the next bytes."""

    # -- called by the transport -------------------------------------------------------------------------------

    def attach(self, writer: asyncio.StreamWriter, already_read: bytes) -> None:
        """Takes over a connection from asyncio's streams, with the bytes already read."""
        # Kept until the end: a garbage-collected writer closes its transport.
        self._writer = writer
        transport = self._transport = cast(asyncio.Transport, writer.transport)
        # Zero: a send returns only when the kernel has all bytes, so its caller may reuse the memory.
        transport.set_write_buffer_limits(high=0)
        transport.set_protocol(self)
        self._counts.received_bytes += len(already_read)
        try:
            self._feed(memoryview(already_read))
        except ProtocolError as exc:
            self.abort(exc)
            return
        if not self._is_reading_paused:
            transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        # A header is received with what follows it.
        return self._wanted if len(self._wanted) > HEADER_BYTES else self._staging

    def buffer_updated(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        self._counts.received_bytes += nbytes
        if self.is_closed or self._has_ended:
            return
        try:
            if len(self._wanted) > HEADER_BYTES:
                self._advance(nbytes)
                self._settle()
            else:
                self._feed(self._staging[:nbytes])
        except ProtocolError as exc:
            self.abort(exc)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._error is None:
            reason = f": {exc}" if exc else ""
            self._error = TransportError(f"the stream to peer {self.remote_peer} broke{reason}")
        self._writer = None
        if self._is_parting:
            self._is_parting = False
            self._counts.num_parting -= 1
        self._drop_body()
        self._receiver.wake()
        self._sender.wake()

    def pause_writing(self) -> None:
        """Makes `write` wait: the kernel's buffer is full."""
        self._is_writing_paused = True

    def resume_writing(self) -> None:
        """Resumes `write`: the kernel has accepted everything."""
        self._is_writing_paused = False
        self._sender.wake()

    # -- called by its users -----------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether it carries no more messages."""
        return self.is_closed or self._has_ended or self._error is not None

    async def send(self, message: Message, *, codec: Codec = "none") -> None:
        if self._allowances is not None:
            self._allowances.asked(message)
        await self.write(await encoded(message, codec))

    async def receive(self, *, timeout_s: float) -> Message | None:
        frame = await self.read(timeout_s)
        if frame is None:
            return None
        claim: Callable[[int], None] | None = None
        if self._turnstile is not None:
            await self._turnstile.enter(self.remote_peer)
            claim = self._charge.claim
        elif frame.tensor_bytes is not None:
            claim = unpacking_claim(frame.tensor_bytes)
        return await decoded(frame.header, frame.body, claim, self._max_tensors)

    async def write(self, parts: Sequence[bytes | memoryview]) -> None:
        """Writes one frame; returns once the kernel has accepted all of it.

        Raises:
            TransportError: If the stream is broken.
            RequestTimeoutError: If the other end accepts no byte for `SEND_STALL_TIMEOUT_S`, or only a trickle.
        """
        transport = self._check_usable()
        self.is_answered = False
        num_bytes = sum(len(part) for part in parts)
        if num_bytes <= _JOIN_BYTES:
            parts = [b"".join(parts)]  # one system call, one packet
        allowed_s = min(num_bytes / limits.MIN_RECEIVE_BYTES_PER_S, limits.MAX_MESSAGE_S)
        deadline = self._loop.time() + limits.SEND_STALL_TIMEOUT_S + allowed_s
        for part in parts:
            view = memoryview(part)
            # In slices: the transport copies what the kernel does not accept at once.
            for offset in range(0, len(view), _SLICE_BYTES):
                transport.write(view[offset : offset + _SLICE_BYTES])
                if self._is_writing_paused:
                    await self._wait_writable(deadline)
                self._check_usable()
        self._counts.sent_bytes += num_bytes

    async def read(self, timeout_s: float) -> Frame | None:
        """Returns the next frame; None when the other end has closed the stream.

        Raises:
            RequestTimeoutError: If no whole frame has arrived within ``timeout_s``; a later call may get it.
            ProtocolError: If what arrived is not a frame, or too large.
            CapacityError: If there was no room for the next frame; it has been dropped, later ones can be read.
            TransportError: If the stream is broken.
        """
        self._charge.release()
        await self.wait(timeout_s)
        if self._frames:
            frame = self._frames.popleft()
            self.is_answered = True
            self._go_on()
            if isinstance(frame, CapacityError):
                raise frame
            self._charge.adopt(frame.header.body_bytes)
            if self._turnstile is None:
                self._charge.release()
            return frame
        if self.is_closed or not self._has_ended:
            self._check_usable()
        return None

    async def wait(self, timeout_s: float) -> None:
        """Waits for the next frame or the end of the stream, without taking it; raises like `read`."""

        def give_up() -> None:
            self._receiver.wake(RequestTimeoutError(f"no message from peer {self.remote_peer} within {timeout_s:g} s"))

        if not self._frames and not self._has_ended:
            self._check_usable()
            self.waits_since = self._loop.time()
            await self._receiver.wait(timeout_s, give_up)
            self.waits_since = math.inf
            if not self._frames and not self._has_ended:
                self._check_usable()

    async def close(self) -> None:
        """Tells the other end and closes the stream. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        transport = self._transport
        if self._sender.is_waiting:
            self.abort(TransportError(f"the channel to peer {self.remote_peer} was closed in mid-message"))
        elif transport is not None and not transport.is_closing():
            transport.write(END_FRAME)
            self._counts.sent_bytes += len(END_FRAME)
            self._part(transport)
        while self._frames:
            frame = self._frames.popleft()
            if isinstance(frame, Frame):
                self._ledger.release(self.remote_peer, frame.header.body_bytes)
        self._charge.release()
        self._drop_body()
        self._parser.close()
        self._unparsed = memoryview(b"")
        self._receiver.wake()

    def abort(self, error: TransportError) -> None:
        """Breaks the stream; waiting and later calls raise ``error``."""
        if self._error is None:
            self._error = error
        if self._transport is not None:
            self._transport.abort()
        self._drop_body()
        self._receiver.wake()
        self._sender.wake()

    # -- inside ------------------------------------------------------------------------------------------------

    def _part(self, transport: asyncio.Transport) -> None:
        """Lingering close, so the last frame is not lost to a reset."""
        # Closing a socket with unread bytes resets it, and the other end loses the last frame (such as a refusal). So
        # late bytes are read and dropped, for a bounded time and on a bounded number of streams.
        if self._has_ended or self._counts.num_parting >= _MAX_PARTING:
            transport.close()
        else:
            self._counts.num_parting += 1
            self._is_parting = True
            transport.write_eof()
            self._resume_reading()
        # Also ends a flush to a peer that does not read.
        self._loop.call_later(_PART_TIMEOUT_S, transport.abort)

    def _parse(self) -> Generator[memoryview, int, None]:
        """Turns what arrives into frames; see `swarm_plugins.transport.receiving.arriving`."""
        while not self._has_ended:
            content = bytearray(HEADER_BYTES)
            yield from fill(memoryview(content))
            header = parse_header(content)
            if header.is_end:
                self._has_ended = True
            elif header.body_bytes == 0:
                raise ProtocolError("a message without metadata")
            else:
                tensor_bytes = None if self._allowances is None else self._allowances.begin(header.body_bytes)
                self._pace.begin(header.body_bytes)
                charge = self._ledger.charge(self.remote_peer)
                # Its memory stays claimed until it is read, and no name here keeps it while the next one is awaited.
                self._add_frame(
                    header, (yield from receive_body(header.body_bytes, charge, self._staging)), tensor_bytes
                )
            self._receiver.wake()
        yield self._staging

    def _add_frame(self, header: FrameHeader, body: Tensor | CapacityError, tensor_bytes: int | None) -> None:
        self._pace.end()
        self._frames.append(body if isinstance(body, CapacityError) else Frame(header, body, tensor_bytes))

    def _feed(self, data: memoryview) -> None:
        """Parses bytes that are not in the wanted memory."""
        while len(data) and not self._has_ended:
            if len(self._frames) >= _MAX_WAITING_FRAMES:
                # Objects take more memory than the bytes of a small message, which are all that is counted.
                self._unparsed = memoryview(bytes(data)) if data.obj is self._staging.obj else data
                break
            count = min(len(data), len(self._wanted))
            self._wanted[:count] = data[:count]
            self._advance(count)
            data = data[count:]
        self._settle()

    def _advance(self, num_bytes: int) -> None:
        """Parses bytes that are in the wanted memory."""
        self._pace.advance(num_bytes)
        self._wanted = self._parser.send(num_bytes)

    def _settle(self) -> None:
        """Watches a body that is not complete, and pauses reading behind as many frames as may wait."""
        self._pace.watch()
        if len(self._frames) >= _MAX_WAITING_FRAMES and not self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = True
            self._transport.pause_reading()

    def _blame(self, said: str) -> None:
        self.abort(RequestTimeoutError(f"peer {self.remote_peer} {said}"))

    def _go_on(self) -> None:
        """Parses what has arrived, and reads on, as far as there is room for frames."""
        data, self._unparsed = self._unparsed, memoryview(b"")
        try:
            self._feed(data)
        except ProtocolError as exc:
            self.abort(exc)
        if len(self._frames) < _MAX_WAITING_FRAMES:
            self._resume_reading()

    def _resume_reading(self) -> None:
        if self._is_reading_paused and self._transport is not None and not self._transport.is_closing():
            self._is_reading_paused = False
            self._transport.resume_reading()

    async def _wait_writable(self, deadline: float) -> None:
        stall_s = max(0.0, min(limits.SEND_STALL_TIMEOUT_S, deadline - self._loop.time()))

        def give_up() -> None:
            self.abort(
                RequestTimeoutError(f"peer {self.remote_peer} has accepted no data for {stall_s:g} s, or hardly any")
            )

        try:
            await self._sender.wait(stall_s, give_up)
        except asyncio.CancelledError:
            # Half a frame has been sent: nothing after it could be decoded.
            self.abort(TransportError(f"sending to peer {self.remote_peer} was cancelled in mid-message"))
            raise

    def _check_usable(self) -> asyncio.Transport:
        if self.is_closed:
            raise TransportError(f"the channel to peer {self.remote_peer} is closed: open a new one")
        if self._error is not None:
            raise self._error
        if self._transport is None or self._transport.is_closing():
            raise TransportError(f"the stream to peer {self.remote_peer} broke")
        return self._transport

    def _drop_body(self) -> None:
        if self._pace.num_bytes:
            self._pace.end()
            self._parser.close()
            self._wanted = self._staging
