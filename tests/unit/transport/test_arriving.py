"""Memory and pace of messages that arrive, counted for the peers that send them. Runs on both event loops."""

from __future__ import annotations

import asyncio
import gc
import struct
import weakref

import pytest
import torch
from stream_kit import both_loops, claims, frame_bytes, limited, read_hidden, stream_and_socket

from swarm_plugins.errors import RequestTimeoutError, TransportError
from swarm_plugins.ledger import BusyError, Ledger
from swarm_plugins.transport.messages import ForwardResponse
from swarm_plugins.transport.receiving.arriving import receive_body
from swarm_plugins.transport.wire import encode


@both_loops
async def test_a_declared_size_alone_claims_little_memory() -> None:
    with limited(FIRST_CHUNK_BYTES=1 << 16):
        budget = Ledger(1 << 30)
        async with stream_and_socket(budget) as (stream, far):
            far.send(struct.pack("<2sBBIQ", b"SW", 1, 0, 64, 400 << 20))
            await claims(budget, 1)
            assert budget.used == 1 << 16
            far.send(bytes(150_000))
            await claims(budget, 150_000)
            # Never more than twice what has arrived.
            assert budget.used <= 300_000 + (1 << 16)
            far.close()
            with pytest.raises(TransportError, match="peer-x broke"):
                await stream.read(5.0)
            assert budget.used == 0


@pytest.mark.parametrize("peers", [("one", "one"), ("one", "two")], ids=["of-one-peer", "of-two"])
@both_loops
async def test_a_message_without_room_is_dropped_and_the_stream_lives_on(peers: tuple[str, str]) -> None:
    # One peer may hold 128,000 bytes; two of them, 85,333 each.
    budget = Ledger(256_000)
    async with (
        stream_and_socket(budget=budget, peer=peers[0]) as (first, far_one),
        stream_and_socket(budget=budget, peer=peers[1]) as (second, far_two),
    ):
        header = struct.pack("<2sBBIQ", b"SW", 1, 0, 64, 80_000)
        far_one.send(header)
        await claims(budget, 1)
        far_two.send(struct.pack("<2sBBIQ", b"SW", 1, 0, 64, 90_000))
        for _ in range(90):
            await asyncio.get_running_loop().sock_sendall(far_two, bytes(1000))
        await asyncio.get_running_loop().sock_sendall(far_two, bytes(64) + frame_bytes(5))
        held = 80_064 if peers[0] == peers[1] else 0
        with pytest.raises(BusyError, match=rf"holds {held} bytes here and all hold 80064 of 256000: .* 90064 more"):
            await second.read(5.0)
        assert (await read_hidden(second)).numel() == 5
        await asyncio.get_running_loop().sock_sendall(far_one, bytes(80_064))
        assert await first.read(5.0) is not None
        assert budget.used == 0


@both_loops
async def test_a_slow_message_is_cut_off_also_when_it_is_not_the_first() -> None:
    with limited(FIRST_MESSAGE_TIMEOUT_S=0.2, MIN_RECEIVE_BYTES_PER_S=100_000.0):
        async with stream_and_socket() as (stream, far):
            far.send(frame_bytes(5))
            assert (await read_hidden(stream)).numel() == 5
            far.send(struct.pack("<2sBBIQ", b"SW", 1, 0, 64, 64_000) + bytes(30_000))
            # 0.2 s and 0.3 s for the bytes that came.
            with pytest.raises(RequestTimeoutError, match=r"has sent 30000 of 64064 bytes .* too slow"):
                await stream.read(10.0)


@both_loops
async def test_a_message_that_never_ends_is_cut_off_at_any_pace() -> None:
    with limited(FIRST_MESSAGE_TIMEOUT_S=0.1, MAX_MESSAGE_S=0.3, MIN_RECEIVE_BYTES_PER_S=1.0):
        async with stream_and_socket() as (stream, far):
            far.send(struct.pack("<2sBBIQ", b"SW", 1, 0, 64, 64_000) + bytes(60_000))
            with pytest.raises(RequestTimeoutError, match="60000 of 64064 bytes"):
                await stream.read(10.0)


@both_loops
async def test_what_a_server_works_on_counts_until_it_reads_again() -> None:
    budget = Ledger(400_000)
    packed = ForwardResponse(hidden=torch.ones(20_000, dtype=torch.bfloat16))
    async with stream_and_socket(budget=budget, is_served=True) as (stream, far):
        far.send(b"".join(encode(packed, codec="rotated8")))
        received = await stream.receive(timeout_s=5.0)
        assert isinstance(received, ForwardResponse)
        # 20,000 bytes and their steps arrived; unpacked they take 2 bytes each.
        assert 60_000 < budget.used < 62_000
        far.send(frame_bytes(5))
        assert await stream.receive(timeout_s=5.0) is not None
        assert budget.used < 1000
        # 100,000 elements arrive in 103 kB and would take 200 kB more: over half of the limit.
        large = ForwardResponse(hidden=torch.ones(100_000, dtype=torch.bfloat16))
        far.send(b"".join(encode(large, codec="rotated8")) + frame_bytes(5))
        with pytest.raises(BusyError, match="there is no room for 200000 more now"):
            await stream.receive(timeout_s=5.0)
        assert await stream.receive(timeout_s=5.0) is not None
    assert budget.used == 0


@both_loops
async def test_unread_messages_count_in_the_budget() -> None:
    budget = Ledger(40_000)
    data = frame_bytes(2000)
    async with stream_and_socket(budget=budget) as (stream, far):
        async with stream_and_socket(budget=budget) as (other, other_far):
            for count in (1, 2):
                far.send(data)
                await claims(budget, count * (len(data) - 16))
            assert budget.used == 2 * (len(data) - 16)
            other_far.send(data)
            with pytest.raises(BusyError, match="this client holds"):
                await other.read(2.0)
        await stream.wait(2.0)
        assert budget.used == 2 * (len(data) - 16)
        assert await stream.read(2.0) is not None
        assert budget.used == len(data) - 16
    assert budget.used == 0


def test_the_memory_of_a_refused_message_is_returned_at_once() -> None:
    def main() -> None:
        ledger = Ledger(100_000, max_peer_share=0.5)
        with ledger.charge("peer-x") as charge:
            body = receive_body(60_000, charge, memoryview(bytearray(1000)))

            def receive() -> weakref.ref[object]:
                # As asyncio does: the frame that calls has the memory in a local variable.
                buffer = next(body)
                body.send(len(buffer))
                return weakref.ref(buffer.obj)  # the array around the memory

            first = receive()
            assert charge.num_held == 0
            assert first() is None

    gc.disable()  # a cycle would keep it until the next collection, uncounted
    try:
        with limited(FIRST_CHUNK_BYTES=30_000):
            main()
    finally:
        gc.enable()
