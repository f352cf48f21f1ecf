"""Frames on a byte stream: reassembly, bounds, ends and breaks. Runs over a pair of sockets, on both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import torch
import uvloop

import swarm_plugins.transport.stream as stream_module
from swarm_plugins.errors import ProtocolError, RequestTimeoutError, TransportError
from swarm_plugins.transport.limits import DEFAULT_LIMITS, WireLimits
from swarm_plugins.transport.messages import ForwardResponse, Message
from swarm_plugins.transport.stream import FrameStream, ReceiveBudget
from swarm_plugins.transport.wire import decode_body, encode

Body = Callable[[], Awaitable[None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Body], None]:
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.SelectorEventLoop

    def run_body(body: Body) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(body(), 20))

    return run_body


@contextlib.asynccontextmanager
async def stream_and_socket(
    limits: WireLimits = DEFAULT_LIMITS, budget: ReceiveBudget | None = None
) -> AsyncIterator[tuple[FrameStream, socket.socket]]:
    """A stream, and the bare socket at its other end."""
    near, far = socket.socketpair()
    far.setblocking(False)
    _, writer = await asyncio.open_unix_connection(sock=near)
    stream = FrameStream("peer-x", limits, budget or ReceiveBudget(limits.max_receiving_bytes))
    stream.attach(writer, b"")
    try:
        yield stream, far
    finally:
        await stream.close()
        far.close()
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def two_streams(limits: WireLimits = DEFAULT_LIMITS) -> AsyncIterator[tuple[FrameStream, FrameStream]]:
    near, far = socket.socketpair()
    ends = []
    for end in (near, far):
        _, writer = await asyncio.open_unix_connection(sock=end)
        stream = FrameStream("peer-x", limits, ReceiveBudget(limits.max_receiving_bytes))
        stream.attach(writer, b"")
        ends.append(stream)
    try:
        yield ends[0], ends[1]
    finally:
        for stream in ends:
            await stream.close()
        await asyncio.sleep(0.01)


def message(num_elements: int) -> ForwardResponse:
    return ForwardResponse(hidden=torch.arange(num_elements, dtype=torch.float32))


def frame_bytes(num_elements: int) -> bytes:
    return b"".join(encode(message(num_elements)))


async def read_hidden(stream: FrameStream, timeout_s: float = 5.0) -> torch.Tensor:
    frame = await stream.read(timeout_s)
    assert frame is not None
    received: Message = decode_body(frame.header, frame.body)
    assert isinstance(received, ForwardResponse)
    return received.hidden


async def claims(budget: ReceiveBudget, num_bytes: int) -> None:
    while budget.used_bytes < num_bytes:
        await asyncio.sleep(0.01)


async def cut_off(far: socket.socket) -> None:
    with pytest.raises(BrokenPipeError):  # noqa: PT012
        while True:
            far.send(b"x")
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("num_elements", [1, 1000, 20_000, 700_000, 3_000_000])
def test_messages_of_any_size_arrive_in_order(run: Callable[[Body], None], num_elements: int) -> None:
    async def body() -> None:
        async with two_streams() as (near, far):

            async def send_all() -> None:
                for extra in range(4):
                    await near.write(encode(message(num_elements + extra)))

            sending = asyncio.create_task(send_all())
            for extra in range(4):
                assert torch.equal(await read_hidden(far), message(num_elements + extra).hidden)
            await sending

    run(body)


def test_frames_cut_anywhere_are_put_together(run: Callable[[Body], None]) -> None:
    async def body() -> None:
        data = frame_bytes(3) + frame_bytes(20)
        async with stream_and_socket() as (stream, far):
            for cut in range(1, len(data), 3):
                far.send(data[:cut])
                await asyncio.sleep(0)
                far.send(data[cut:])
                assert (await read_hidden(stream)).numel() == 3
                assert (await read_hidden(stream)).numel() == 20

    run(body)


def test_bytes_read_before_the_takeover_are_not_lost(run: Callable[[Body], None]) -> None:
    async def body() -> None:
        near, far = socket.socketpair()
        data = frame_bytes(20)
        _, writer = await asyncio.open_unix_connection(sock=near)
        stream = FrameStream("peer-x", DEFAULT_LIMITS, ReceiveBudget(1 << 30))
        stream.attach(writer, data[:30])
        far.send(data[30:])
        assert (await read_hidden(stream)).numel() == 20
        await stream.close()
        far.close()
        await asyncio.sleep(0.01)

    run(body)


def test_garbage_read_before_the_takeover_breaks_the_stream(run: Callable[[Body], None]) -> None:
    async def body() -> None:
        near, far = socket.socketpair()
        far.settimeout(5.0)
        _, writer = await asyncio.open_unix_connection(sock=near)
        stream = FrameStream("peer-x", DEFAULT_LIMITS, ReceiveBudget(1 << 30))
        stream.attach(writer, b"\xff" * 100)
        with pytest.raises(ProtocolError, match="not a frame"):
            await stream.read(5.0)
        await asyncio.sleep(0.01)
        assert far.recv(1) == b""
        far.close()

    run(body)


def test_a_declared_size_alone_claims_little_memory(run: Callable[[Body], None]) -> None:
    async def body() -> None:
        limits = WireLimits(first_chunk_bytes=1 << 16)
        budget = ReceiveBudget(1 << 30)
        async with stream_and_socket(limits, budget) as (stream, far):
            far.send(struct.pack("<2sBBIQ", b"SW", 1, 0, 64, 400 << 20))
            await claims(budget, 1)
            assert budget.used_bytes == 1 << 16
            far.send(bytes(150_000))
            await claims(budget, 150_000)
            # Never more than twice what has arrived.
            assert budget.used_bytes <= 300_000 + (1 << 16)
            far.close()
            with pytest.raises(TransportError, match="peer-x broke"):
                await stream.read(5.0)
            assert budget.used_bytes == 0

    run(body)


def test_all_unfinished_messages_share_one_budget(run: Callable[[Body], None]) -> None:
    async def body() -> None:
        budget = ReceiveBudget(100_000)
        async with (
            stream_and_socket(budget=budget) as (first, far_one),
            stream_and_socket(budget=budget) as (
                second,
                far_two,
            ),
        ):
            header = struct.pack("<2sBBIQ", b"SW", 1, 0, 64, 64_000)
            far_one.send(header)
            await claims(budget, 1)
            far_two.send(header)
            with pytest.raises(ProtocolError, match="hold 64064 bytes, 64064 more exceed the limit of 100000"):
                await second.read(5.0)
            far_one.send(bytes(64_064))
            assert await first.read(5.0) is not None
            assert budget.used_bytes == 0

    run(body)


def test_oversize_and_garbage_break_the_stream_at_the_header(run: Callable[[Body], None]) -> None:
    async def body() -> None:
        async with stream_and_socket() as (stream, far):
            far.send(struct.pack("<2sBBIQ", b"SW", 1, 0, 64, 1 << 40))
            with pytest.raises(ProtocolError, match="the limit is 541065216"):
                await stream.read(5.0)
            assert far.recv(1) == b""
        async with stream_and_socket() as (stream, far):
            far.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            with pytest.raises(ProtocolError, match="not a frame"):
                await stream.read(5.0)

    run(body)


def test_silence_times_out_and_the_stream_stays_usable(run: Callable[[Body], None]) -> None:
    async def body() -> None:
        async with stream_and_socket() as (stream, far):
            data = frame_bytes(20)
            far.send(data[:50])
            with pytest.raises(RequestTimeoutError, match=r"no message from peer peer-x within 0\.05 s"):
                await stream.read(0.05)
            far.send(data[50:])
            assert (await read_hidden(stream)).numel() == 20

    run(body)


def test_close_lets_the_other_end_read_what_was_sent(run: Callable[[Body], None]) -> None:
    async def body() -> None:
        async with two_streams() as (near, far):
            await near.write(encode(message(5)))
            await near.close()
            await near.close()
            assert (await read_hidden(far)).numel() == 5
            assert await far.read(5.0) is None
            assert await far.read(5.0) is None
            with pytest.raises(TransportError, match="channel to peer peer-x is closed"):
                await near.read(1.0)
            with pytest.raises(TransportError, match="channel to peer peer-x is closed"):
                await near.write(encode(message(5)))

    run(body)


def test_the_last_frame_is_read_although_the_other_end_still_sends(run: Callable[[Body], None]) -> None:
    async def body() -> None:
        async with two_streams() as (near, far):
            await far.write(encode(message(7)))
            await near.write(encode(message(5)))
            await near.close()  # with a message unread
            await far.write(encode(message(7)))
            assert (await read_hidden(far)).numel() == 5
            assert await far.read(5.0) is None

    run(body)


def test_a_peer_that_never_closes_is_cut_off(run: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_PART_TIMEOUT_S", 0.1)

    async def body() -> None:
        budget = ReceiveBudget(1 << 30)
        async with stream_and_socket(budget=budget) as (stream, far):
            await stream.close()
            assert budget.num_parting == 1
            await cut_off(far)
            assert budget.num_parting == 0

    run(body)


def test_few_streams_linger_at_a_time(run: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_MAX_PARTING", 1)
    monkeypatch.setattr(stream_module, "_PART_TIMEOUT_S", 60.0)

    async def body() -> None:
        budget = ReceiveBudget(1 << 30)
        async with stream_and_socket(budget=budget) as (first, _), stream_and_socket(budget=budget) as (second, far):
            await first.close()
            await second.close()
            assert budget.num_parting == 1
            await cut_off(far)

    run(body)


def test_a_break_is_told_from_an_end_and_wakes_waiters(run: Callable[[Body], None]) -> None:
    async def body() -> None:
        async with stream_and_socket() as (stream, far):
            waiting = asyncio.create_task(stream.read(10.0))
            await asyncio.sleep(0.01)
            far.close()
            with pytest.raises(TransportError, match="the stream to peer peer-x broke"):
                await waiting
            with pytest.raises(TransportError, match="broke"):
                await stream.write(encode(message(5)))

    run(body)


def test_a_reader_that_reads_nothing_stops_the_sender(run: Callable[[Body], None]) -> None:
    async def body() -> None:
        async with stream_and_socket(WireLimits(send_stall_timeout_s=0.1)) as (stream, _):
            with pytest.raises(RequestTimeoutError, match=r"accepted no data for 0\.1 s"):
                await stream.write(encode(message(2_000_000)))

    run(body)


def test_unread_messages_stop_the_sender_instead_of_filling_memory(run: Callable[[Body], None]) -> None:
    async def body() -> None:
        async with two_streams(WireLimits(send_stall_timeout_s=0.2)) as (near, far):
            sent = 0
            with pytest.raises(RequestTimeoutError):  # noqa: PT012
                for sent in range(100):  # noqa: B007
                    await near.write(encode(message(100_000)))
            assert sent < 10
            assert len(far._frames) <= 3

    run(body)


def test_a_reader_that_takes_a_little_now_and_then_is_given_up(run: Callable[[Body], None]) -> None:
    limits = WireLimits(send_stall_timeout_s=0.3, min_receive_bytes_per_s=1e9)

    async def body() -> None:
        async with stream_and_socket(limits) as (stream, far):
            taken = 0

            async def sip() -> None:
                nonlocal taken
                while True:
                    await asyncio.sleep(0.05)
                    # Enough for the kernel to take more each time, so that no single wait is long.
                    taken += len(await asyncio.get_running_loop().sock_recv(far, 300_000))

            sipping = asyncio.create_task(sip())
            with pytest.raises(RequestTimeoutError, match=r"accepted no data for .* or hardly any"):
                await stream.write(encode(message(16_000_000)))
            sipping.cancel()
            await asyncio.gather(sipping, return_exceptions=True)
            # Of 64 MB: in the 0.4 s that such a message is given, such a reader takes 2 MB.
            assert taken < 32_000_000

    run(body)


def test_unread_messages_count_in_the_budget(run: Callable[[Body], None]) -> None:
    async def body() -> None:
        budget = ReceiveBudget(20_000)
        data = frame_bytes(2000)
        async with stream_and_socket(budget=budget) as (stream, far):
            async with stream_and_socket(budget=budget) as (other, other_far):
                for count in (1, 2):
                    far.send(data)
                    await claims(budget, count * (len(data) - 16))
                assert budget.used_bytes == 2 * (len(data) - 16)
                other_far.send(data)
                with pytest.raises(ProtocolError, match="incoming messages hold"):
                    await other.read(2.0)
            await stream.wait(2.0)
            assert budget.used_bytes == 2 * (len(data) - 16)
            assert await stream.read(2.0) is not None
            assert budget.used_bytes == len(data) - 16
        assert budget.used_bytes == 0

    run(body)


def test_cancelling_half_a_send_breaks_the_stream(run: Callable[[Body], None]) -> None:
    async def body() -> None:
        async with stream_and_socket() as (stream, _):
            sending = asyncio.create_task(stream.write(encode(message(2_000_000))))
            await asyncio.sleep(0.02)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            with pytest.raises(TransportError, match="cancelled in mid-message"):
                await stream.write(encode(message(1)))

    run(body)


def test_memory_may_be_reused_when_write_returns(run: Callable[[Body], None]) -> None:
    async def body() -> None:
        async with two_streams() as (near, far):
            reading = asyncio.create_task(read_hidden(far))
            sent = message(1_000_000)
            await near.write(encode(sent))
            sent.hidden.zero_()
            assert torch.equal(await reading, message(1_000_000).hidden)

    run(body)
