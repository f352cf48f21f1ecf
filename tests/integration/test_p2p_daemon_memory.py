"""Half-sent calls of a stranger, which stay in the libp2p daemon."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from p2p_kit import client, server

from swarm_plugins.transport.daemon import memory as daemon_memory
from swarm_plugins.transport.daemon.memory import resident_bytes
from swarm_plugins.transport.p2p_channel import open_stream
from swarm_plugins.transport.server_info import InfoRequest

pytestmark = pytest.mark.swarm


async def half_a_call(socket_path: str, peer: str) -> None:
    """Sends a call of the DHT of 1 MiB, all but its end; returns when the stream is cut off."""
    with contextlib.suppress(OSError):
        reader, writer = await open_stream(socket_path, peer, "DHTProtocol.rpc_ping")
        size = (1 << 20) - 100
        try:
            writer.write(bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14]) + bytes(size - 1000))
            await reader.read()
        finally:
            writer.transport.abort()


async def test_half_sent_calls_do_not_fill_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    num_calls = 180
    monkeypatch.setenv("GOMEMLIMIT", "64MiB")
    monkeypatch.setattr(daemon_memory, "_SETTLE_S", 20.0)
    async with server() as victim, client(*await victim.addresses()) as honest:
        before = resident_bytes(victim._daemon.pid)
        if before is None:
            pytest.skip("this system does not tell the memory of processes")
        monkeypatch.setattr(daemon_memory, "MOST_BYTES", before + (120 << 20))
        channel = await honest.open(victim.peer_id, "rpc_forward", timeout_s=20.0)
        await channel.send(InfoRequest())
        assert await channel.receive(timeout_s=20.0) == InfoRequest()
        async with client(*await victim.addresses()) as attacker:
            socket_path = attacker._daemon.socket_path
            # Without a bound they stay open for ever; what comes after the cut may fit.
            calls = [asyncio.create_task(half_a_call(socket_path, victim.peer_id)) for _ in range(num_calls)]
            done, rest = await asyncio.wait(calls, timeout=60.0, return_when=asyncio.FIRST_COMPLETED)
            assert done
            for call in rest:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        # Who is served stays connected.
        await channel.send(InfoRequest())
        assert await channel.receive(timeout_s=20.0) == InfoRequest()
