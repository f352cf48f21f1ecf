"""A server whose answer is late has to show that it is at work, as fast as the link lets it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import torch
import virtual_time
from client_kit import VERSION, server_info

from swarm_plugins.block_io import SpanInputs
from swarm_plugins.book.record import Expected
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.discovery.view import SwarmView
from swarm_plugins.client.peers import Peers
from swarm_plugins.client.servers import Servers
from swarm_plugins.client.training.batch import BatchCall
from swarm_plugins.errors import RequestTimeoutError, SwarmError
from swarm_plugins.ledger import Ledger
from swarm_plugins.routing.chain import SpanChoice
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.local import LocalRoutes
from swarm_plugins.transport.messages import Failure, FailureKind, ForwardRequest, ForwardResponse, Message
from swarm_plugins.transport.stream import FrameStream


async def ask(num_tokens: int, *, sign_s: float, sign: Message | None = None) -> ForwardResponse:
    """Returns the answer of a server that takes 12 s, and meanwhile ``sign_s`` to say that it is at work, or this."""

    async def handle(channel: Channel) -> None:
        while (message := await channel.receive(timeout_s=60.0)) is not None:
            if isinstance(message, ForwardRequest):
                await asyncio.sleep(12.0)
                await channel.send(ForwardResponse(hidden=message.hidden))
            else:
                await asyncio.sleep(sign_s)
                await channel.send(sign or server_info(0, 1, 1))

    transport = LocalTransport({"a": dict.fromkeys(("rpc_info", "rpc_forward"), handle)})
    peers = Peers(transport, SwarmConfig())
    peers.book.observe("a", Expected(step_s=5.0, token_s=0.0))
    request = ForwardRequest(version=VERSION.key, start=0, end=1, hidden=torch.zeros(1, num_tokens, 1024))
    try:
        return await peers.request("a", "rpc_forward", request, ForwardResponse)
    finally:
        await peers.close()
        await transport.close()


def test_a_sign_of_life_behind_a_large_request_is_waited_for() -> None:
    answer = virtual_time.run(ask(256, sign_s=6.0), timeout_s=60)
    assert answer.hidden.shape == (1, 256, 1024)


def test_one_behind_a_small_request_is_not() -> None:
    with pytest.raises(RequestTimeoutError, match=r"it is not at work: .* what it serves within 2\.\d+ s"):
        virtual_time.run(ask(1, sign_s=6.0), timeout_s=60)


@pytest.mark.parametrize("kind", ["overloaded", "out_of_memory"])
def test_a_refused_question_is_a_sign_of_life_too(kind: FailureKind) -> None:
    answer = virtual_time.run(ask(1, sign_s=0.0, sign=Failure(kind=kind, message="512 streams are open")), timeout_s=60)
    assert answer.hidden.shape == (1, 1, 1024)


class Clogged(LocalTransport):
    """Streams to a server that reads no request until it was asked so often whether it is at work."""

    def __init__(self, reads_after: float, *, answers: bool) -> None:
        super().__init__({"a": {"rpc_info": self.tell}})
        self.reads_after = reads_after
        self.answers = answers
        self.ends: list[socket.socket] = []

    async def tell(self, channel: Channel) -> None:
        while await channel.receive(timeout_s=1000.0) is not None:
            self.reads_after -= 1
            if self.reads_after == 0:
                self.serving = asyncio.create_task(self.serve())
            if self.answers:
                await channel.send(server_info(0, 1, 1))

    async def serve(self) -> None:
        channel = await stream_over(self.ends[0])
        request = await channel.receive(timeout_s=10.0)
        assert isinstance(request, ForwardRequest)
        await channel.send(ForwardResponse(hidden=request.hidden))
        await channel.close()

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        if rpc == "rpc_info":
            return await super().open(peer, rpc, timeout_s=timeout_s)
        near, far = socket.socketpair()
        self.ends.append(far)
        return await stream_over(near)


async def stream_over(end: socket.socket) -> FrameStream:
    _, writer = await asyncio.open_unix_connection(sock=end)
    stream = FrameStream("a", Ledger(1 << 30))
    stream.attach(writer, b"")
    return stream


@contextlib.asynccontextmanager
async def clogged(reads_after: float, *, answers: bool) -> AsyncIterator[Peers]:
    transport = Clogged(reads_after, answers=answers)
    peers = Peers(transport, SwarmConfig(request_timeout_s=6.0))
    try:
        yield peers
    finally:
        await peers.close()
        await transport.close()
        for end in transport.ends:
            end.close()


LARGE = ForwardRequest(version=VERSION.key, start=0, end=1, hidden=torch.zeros(1, 1024, 576))
"""More than the buffers of a stream hold."""


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        pytest.param(False, r"within 8\.0 s, and it is not at work: .* within 5 s", id="hangs"),
        pytest.param(True, r"within 2\d\.\d s$", id="claims to be at work"),
    ],
)
async def test_a_server_that_does_not_take_a_large_request_is_given_up(answers: bool, match: str) -> None:
    async with clogged(float("inf"), answers=answers) as peers:
        with pytest.raises(RequestTimeoutError, match=f"peer a has not taken a request of 2359296 bytes {match}"):
            await peers.request("a", "rpc_forward", LARGE, ForwardResponse)
        assert peers.book["a"].work["rpc_forward"].num_missed == 1


async def test_one_that_is_at_work_may_take_it_late() -> None:
    async with clogged(3, answers=True) as peers:
        answer = await peers.request("a", "rpc_forward", LARGE, ForwardResponse)
        assert answer.hidden.shape == LARGE.hidden.shape


async def test_blocks_that_hang_in_this_process_do_not_hang_the_client() -> None:
    async def hang(channel: Channel) -> None:
        while await channel.receive(timeout_s=1e6) is not None:
            await asyncio.sleep(1e6)

    class Here:
        async def stand_in(self, blocks: range) -> list[SpanChoice]:
            return [SpanChoice("here", blocks.start, blocks.stop)]

        async def close(self) -> None:
            await local.end("here")

    local, here = LocalRoutes(LocalTransport({})), Here()
    local.serve("here", dict.fromkeys(("rpc_info", "rpc_forward"), hang))
    peers = Peers(local, SwarmConfig(max_retries=1))
    peers.book.observe("here", Expected(step_s=60.0, token_s=1.0))
    view = SwarmView(LocalTransport({}), peers, peers.config, version=VERSION, num_blocks=1, fallback=here)
    inputs = SpanInputs(blocks=range(1), hidden=torch.zeros(1, 2, 4))
    async with asyncio.timeout(3600):
        with pytest.raises(SwarmError, match=r"no message from here within .* it is not at work"):
            await BatchCall(Servers(peers, view), inputs, keep=False).forward()
    await here.close()
    await peers.close()


async def test_what_has_come_in_this_process_is_received_without_a_wait() -> None:
    async def answer(channel: Channel) -> None:
        await channel.send(server_info(0, 1, 1))
        has_sent.set()

    has_sent = asyncio.Event()
    routes = LocalRoutes(LocalTransport({}))
    routes.serve("a", {"rpc_info": answer})
    channel = await routes.open("a", "rpc_info", timeout_s=5.0)
    await has_sent.wait()
    assert await channel.receive(timeout_s=0.0) == server_info(0, 1, 1)
