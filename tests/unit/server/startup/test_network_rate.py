"""A server measures its network by echoes of others, in bounded time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
import torch
import virtual_time
from fake_server import VERSION, transport_to

from swarm_plugins.errors import TransportError
from swarm_plugins.server.service import Service
from swarm_plugins.server.startup.network_rate import network_rate
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import Failure
from swarm_plugins.transport.server_info import MAX_ECHO_BYTES, EchoRequest, EchoResponse, ServerInfo

INFO = ServerInfo(version=VERSION, model="m", num_blocks=8, start=0, end=4, dtype="float32", quantization="none")


class Network:
    """A network of one other server, whose handler of ``rpc_info`` is given."""

    peer_id = "me"

    def __init__(self, handler: Callable[[Channel], object] | None) -> None:
        self.transport = LocalTransport({} if handler is None else {"other": {"rpc_info": handler}})  # type: ignore[dict-item]

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        if (version, num_blocks) != (VERSION, 8):
            raise TransportError("no answer")
        return {"other": INFO, "me": INFO}

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        return await self.transport.open(peer, rpc, timeout_s=timeout_s)


def slow_echo(bytes_per_s: float) -> Callable[[Channel], object]:
    async def handler(channel: Channel) -> None:
        while (request := await channel.receive(timeout_s=5.0)) is not None:
            assert isinstance(request, EchoRequest)
            await asyncio.sleep(request.payload.nbytes / bytes_per_s)
            await channel.send(EchoResponse(payload=request.payload))

    return handler


async def liar(channel: Channel) -> None:
    while (request := await channel.receive(timeout_s=5.0)) is not None:
        assert isinstance(request, EchoRequest)
        await channel.send(EchoResponse(payload=torch.zeros_like(request.payload)))


async def silent(channel: Channel) -> None:
    await asyncio.sleep(60)


def rate(handler: Callable[[Channel], object] | None, version: str = VERSION) -> float:
    return virtual_time.run(network_rate(Network(handler), version, 8, token_bytes=1024), timeout_s=120)


def test_the_rate_is_that_of_the_line() -> None:
    assert rate(slow_echo(2e6)) == pytest.approx(2e6 / 1024, rel=0.01)


def test_a_peer_that_is_late_with_small_echoes_makes_the_network_at_most_twice_as_fast() -> None:
    async def late(channel: Channel) -> None:
        while (request := await channel.receive(timeout_s=5.0)) is not None:
            assert isinstance(request, EchoRequest)
            await asyncio.sleep(0.3)  # whatever the size
            await channel.send(EchoResponse(payload=request.payload))

    assert rate(late) <= 2 * MAX_ECHO_BYTES / 0.3 / 1024


@pytest.mark.parametrize("handler", [liar, silent, None], ids=["liar", "silent", "gone"])
def test_without_an_honest_echo_the_rate_is_unknown(handler: Callable[[Channel], object] | None) -> None:
    async def measured() -> float:
        started = time.monotonic()
        assert await network_rate(Network(handler), VERSION, 8, token_bytes=1024) == 0
        return time.monotonic() - started

    assert virtual_time.run(measured(), timeout_s=120) < 2.1  # of one peer


def test_without_a_directory_the_rate_is_unknown() -> None:
    assert rate(slow_echo(1e9), "other") == 0


def test_a_server_echoes_what_is_small(service: Service) -> None:
    async def run() -> None:
        transport = transport_to(service, "alice")
        channel = await transport.open("server", "rpc_info", timeout_s=5)
        for size, kind in ((MAX_ECHO_BYTES, EchoResponse), (MAX_ECHO_BYTES + 1, Failure), (0, EchoResponse)):
            await channel.send(EchoRequest(payload=torch.ones(size, dtype=torch.uint8)))
            assert isinstance(await channel.receive(timeout_s=5), kind)
        await transport.close()

    asyncio.run(run())
