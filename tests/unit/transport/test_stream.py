"""Frames on a byte stream: reassembly, bounds, ends and breaks. Runs over a pair of sockets, on both event loops."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stream_kit import both_loops, frame_bytes, limited, message, read_hidden, stream_and_socket, two_streams

import swarm_plugins.transport.stream as stream_module
from swarm_plugins.errors import ProtocolError, RequestTimeoutError, TransportError
from swarm_plugins.ledger import Ledger
from swarm_plugins.transport import wire
from swarm_plugins.transport.counts import StreamCounts
from swarm_plugins.transport.messages import ForwardResponse, Message
from swarm_plugins.transport.node import SwarmNode
from swarm_plugins.transport.receiving import arriving
from swarm_plugins.transport.stream import FrameStream
from swarm_plugins.transport.wire import END_FRAME, encode


async def cut_off(far: socket.socket) -> None:
    with pytest.raises(BrokenPipeError):  # noqa: PT012
        while True:
            far.send(b"x")
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("num_elements", [1, 1000, 20_000, 700_000, 3_000_000])
@both_loops
async def test_messages_of_any_size_arrive_in_order(num_elements: int) -> None:
    async with two_streams() as (near, far):

        async def send_all() -> None:
            for extra in range(4):
                await near.write(encode(message(num_elements + extra)))

        sending = asyncio.create_task(send_all())
        for extra in range(4):
            assert torch.equal(await read_hidden(far), message(num_elements + extra).hidden)
        await sending


@both_loops
async def test_long_tensors_are_packed_and_unpacked_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MiB take 0.1 s to unpack and up to 0.8 s to pack, in which no other peer would get an answer."""
    threads: dict[str, set[int]] = {"pack": set(), "unpack_rotated8": set()}

    def note(name: str) -> None:
        plain = getattr(wire, name)

        def noting(*args: Any) -> Any:
            threads[name].add(threading.get_ident())
            return plain(*args)

        monkeypatch.setattr(wire, name, noting)

    for name in threads:
        note(name)
    found: list[Message | None] = []
    async with two_streams() as (near, far):
        sending = asyncio.create_task(near.send(message(1 << 18), codec="rotated8"))
        found.append(await far.receive(timeout_s=20.0))
        await sending
    assert all(seen and threading.get_ident() not in seen for seen in threads.values())
    want = wire.decode(b"".join(encode(message(1 << 18), codec="rotated8")))
    assert isinstance(found[0], ForwardResponse)
    assert isinstance(want, ForwardResponse)
    assert found[0].hidden.equal(want.hidden)


@both_loops
async def test_frames_cut_anywhere_are_put_together() -> None:
    data = frame_bytes(3) + frame_bytes(20)
    async with stream_and_socket() as (stream, far):
        for cut in range(1, len(data), 3):
            far.send(data[:cut])
            await asyncio.sleep(0)
            far.send(data[cut:])
            assert (await read_hidden(stream)).numel() == 3
            assert (await read_hidden(stream)).numel() == 20


@both_loops
async def test_bytes_read_before_the_takeover_are_not_lost() -> None:
    near, far = socket.socketpair()
    data = frame_bytes(20)
    _, writer = await asyncio.open_unix_connection(sock=near)
    stream = FrameStream("peer-x", Ledger(1 << 30))
    stream.attach(writer, data[:30])
    far.send(data[30:])
    assert (await read_hidden(stream)).numel() == 20
    await stream.close()
    far.close()
    await asyncio.sleep(0.01)


@both_loops
async def test_garbage_read_before_the_takeover_breaks_the_stream() -> None:
    near, far = socket.socketpair()
    far.settimeout(5.0)
    _, writer = await asyncio.open_unix_connection(sock=near)
    stream = FrameStream("peer-x", Ledger(1 << 30))
    stream.attach(writer, b"\xff" * 100)
    with pytest.raises(ProtocolError, match="not a frame"):
        await stream.read(5.0)
    await asyncio.sleep(0.01)
    assert far.recv(1) == b""
    far.close()


@both_loops
async def test_oversize_and_garbage_break_the_stream_at_the_header() -> None:
    async with stream_and_socket() as (stream, far):
        far.send(struct.pack("<2sBBIQ", b"SW", 1, 0, 64, 1 << 40))
        with pytest.raises(ProtocolError, match="the limit is 541065216"):
            await stream.read(5.0)
        assert far.recv(1) == b""
    async with stream_and_socket() as (stream, far):
        far.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with pytest.raises(ProtocolError, match="not a frame"):
            await stream.read(5.0)


@both_loops
async def test_silence_times_out_and_the_stream_stays_usable() -> None:
    async with stream_and_socket() as (stream, far):
        data = frame_bytes(20)
        far.send(data[:50])
        with pytest.raises(RequestTimeoutError, match=r"no message from peer peer-x within 0\.05 s"):
            await stream.read(0.05)
        far.send(data[50:])
        assert (await read_hidden(stream)).numel() == 20


@both_loops
async def test_close_lets_the_other_end_read_what_was_sent() -> None:
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


@both_loops
async def test_the_last_frame_is_read_although_the_other_end_still_sends() -> None:
    async with two_streams() as (near, far):
        await far.write(encode(message(7)))
        await near.write(encode(message(5)))
        await near.close()  # with a message unread
        await far.write(encode(message(7)))
        assert (await read_hidden(far)).numel() == 5
        assert await far.read(5.0) is None


@both_loops
async def test_a_peer_that_never_closes_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_PART_TIMEOUT_S", 0.1)
    counts = StreamCounts()
    async with stream_and_socket(counts=counts) as (stream, far):
        await stream.close()
        assert counts.num_parting == 1
        await cut_off(far)
        assert counts.num_parting == 0


@both_loops
async def test_few_streams_linger_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_MAX_PARTING", 1)
    monkeypatch.setattr(stream_module, "_PART_TIMEOUT_S", 60.0)
    counts = StreamCounts()
    async with (
        stream_and_socket(counts=counts) as (first, _),
        stream_and_socket(counts=counts) as (second, far),
    ):
        await first.close()
        await second.close()
        assert counts.num_parting == 1
        await cut_off(far)


@both_loops
async def test_a_break_is_told_from_an_end_and_wakes_waiters() -> None:
    async with stream_and_socket() as (stream, far):
        waiting = asyncio.create_task(stream.read(10.0))
        await asyncio.sleep(0.01)
        far.close()
        with pytest.raises(TransportError, match="the stream to peer peer-x broke"):
            await waiting
        with pytest.raises(TransportError, match="broke"):
            await stream.write(encode(message(5)))


@both_loops
async def test_a_reader_that_reads_nothing_stops_the_sender() -> None:
    with limited(SEND_STALL_TIMEOUT_S=0.1):
        async with stream_and_socket() as (stream, _):
            with pytest.raises(RequestTimeoutError, match=r"accepted no data for 0\.1 s"):
                await stream.write(encode(message(2_000_000)))


@both_loops
async def test_unread_messages_stop_the_sender_instead_of_filling_memory() -> None:
    with limited(SEND_STALL_TIMEOUT_S=0.2):
        async with two_streams() as (near, far):
            sent = 0
            with pytest.raises(RequestTimeoutError):  # noqa: PT012
                for sent in range(100):  # noqa: B007
                    await near.write(encode(message(100_000)))
            assert sent < 10
            assert len(far._frames) <= 3


@both_loops
async def test_a_message_that_was_read_is_gone_while_the_next_one_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is counted no more: on each of many streams, one could be kept that way."""
    bodies: list[weakref.ref[torch.Tensor]] = []
    plain = arriving._allocated

    def allocated(make: Callable[[], torch.Tensor]) -> torch.Tensor:
        body = plain(make)
        bodies.append(weakref.ref(body))
        return body

    monkeypatch.setattr(arriving, "_allocated", allocated)
    gc.disable()
    try:
        async with stream_and_socket() as (stream, far):
            far.send(frame_bytes(5000))
            assert (await read_hidden(stream)).numel() == 5000
            waiting = asyncio.create_task(stream.receive(timeout_s=20.0))
            await asyncio.sleep(0)
            assert bodies
            assert not any(body() is not None for body in bodies)
            far.send(frame_bytes(5000))
            assert await waiting is not None
    finally:
        gc.enable()


@both_loops
async def test_of_very_many_small_messages_few_become_objects() -> None:
    async with stream_and_socket() as (stream, far):
        sent = b"".join(frame_bytes(number) for number in range(1, 100)) + END_FRAME
        far.send(sent)
        await stream.wait(5.0)
        assert len(stream._frames) == 2
        for number in range(1, 100):
            assert (await read_hidden(stream)).numel() == number
            assert len(stream._frames) <= 2
        assert await stream.read(5.0) is None


@both_loops
async def test_garbage_behind_waiting_messages_breaks_the_stream_in_its_turn() -> None:
    async with stream_and_socket() as (stream, far):
        far.send(b"".join(frame_bytes(number) for number in range(1, 6)) + b"garbage" * 10)
        for number in range(1, 6):
            assert (await read_hidden(stream)).numel() == number
        with pytest.raises(ProtocolError, match="not a frame"):
            await stream.read(5.0)


@pytest.mark.parametrize(
    "bounds", [{"MIN_RECEIVE_BYTES_PER_S": 1e9}, {"MIN_RECEIVE_BYTES_PER_S": 1.0, "MAX_MESSAGE_S": 0.1}], ids=str
)
@both_loops
async def test_a_reader_that_takes_a_little_now_and_then_is_given_up(bounds: dict[str, float]) -> None:
    with limited(SEND_STALL_TIMEOUT_S=0.3, **bounds):
        async with stream_and_socket() as (stream, far):
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


@both_loops
async def test_cancelling_half_a_send_breaks_the_stream() -> None:
    async with stream_and_socket() as (stream, _):
        sending = asyncio.create_task(stream.write(encode(message(2_000_000))))
        await asyncio.sleep(0.02)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises(TransportError, match="cancelled in mid-message"):
            await stream.write(encode(message(1)))


@both_loops
async def test_memory_may_be_reused_when_write_returns() -> None:
    async with two_streams() as (near, far):
        reading = asyncio.create_task(read_hidden(far))
        sent = message(1_000_000)
        await near.write(encode(sent))
        sent.hidden.zero_()
        assert torch.equal(await reading, message(1_000_000).hidden)


async def test_a_node_is_in_use_by_sessions_and_by_requests_that_are_not_answered() -> None:
    async def call(stream: FrameStream, server: FrameStream) -> None:
        await stream.send(message(1))
        assert await server.receive(timeout_s=20.0) is not None
        await server.send(message(1))
        assert await stream.receive(timeout_s=20.0) is not None

    node = SwarmNode()
    async with two_streams() as session, two_streams() as kept:
        node._opened.update({session[0]: "rpc_session", kept[0]: "rpc_forward"})
        assert node.num_opened == 2
        await call(*kept)
        await call(*session)
        assert node.num_opened == 1
        await kept[0].send(message(1))
        assert node.num_opened == 2
        await session[1].close()
        assert await session[0].receive(timeout_s=20.0) is None
        kept[0].abort(TransportError("gone"))
        assert node.num_opened == 0
