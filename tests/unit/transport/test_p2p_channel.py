"""The accepting side: limits per peer, slow first messages, handlers that fail. Runs over pairs of sockets."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import virtual_time
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr
from stream_kit import limited

import swarm_plugins.transport.p2p_channel as p2p_channel
from swarm_plugins.errors import TransportError
from swarm_plugins.ledger import Groups, Ledger
from swarm_plugins.transport import limits
from swarm_plugins.transport.channel import BackoffError, Channel, Handler, dial_error
from swarm_plugins.transport.messages import Failure, ForwardResponse, SessionStep
from swarm_plugins.transport.p2p_channel import Acceptor, open_channel
from swarm_plugins.transport.server_info import InfoRequest
from swarm_plugins.transport.stream import FrameStream
from swarm_plugins.transport.wire import encode

PEER_ID = "12D3KooWGRUfnLkV7dVvRbEy3Wp3PZXYGJXhYZPFMeSKzYxkbYpT"
ADDRESS = Multiaddr("/ip4/203.0.113.7/udp/1/quic-v1").to_bytes() + b"\xd1\x03"
"""With a protocol that hivemind cannot read, WebTransport."""


class _Peer:
    def __init__(self, name: str) -> None:
        self.name = name

    def to_base58(self) -> str:
        return self.name


async def echo(channel: Channel) -> None:
    while (received := await channel.receive(timeout_s=20.0)) is not None:
        await channel.send(received)


@asynccontextmanager
async def connected(
    acceptor: Acceptor, handler: Handler, peer: str = "peer-x", rpc: str = "rpc_forward"
) -> AsyncIterator[FrameStream]:
    near, far = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=far)
    info = SimpleNamespace(peer_id=_Peer(peer), addr=Multiaddr(ADDRESS))
    serving = asyncio.create_task(acceptor.accept(rpc, handler, info, reader, writer))  # type: ignore[arg-type]
    _, writer = await asyncio.open_unix_connection(sock=near)
    stream = FrameStream("server", Ledger(1 << 30))
    stream.attach(writer, b"")
    try:
        yield stream
    finally:
        await stream.close()
        await asyncio.wait({serving}, timeout=20.0)
        assert serving.done()
        assert serving.cancelled() or serving.exception() is None
        await asyncio.sleep(0.01)


def acceptor_with(groups: Groups | None = None, max_streams: int = limits.MAX_STREAMS) -> Acceptor:
    with limited(MAX_STREAMS=max_streams):
        return Acceptor(Ledger(limits.MAX_RECEIVING_BYTES, groups=groups))


async def test_messages_reach_the_handler_with_the_proved_peer() -> None:
    seen = []

    async def handler(channel: Channel) -> None:
        seen.append(channel.remote_peer)
        await echo(channel)

    acceptor = acceptor_with()
    async with connected(acceptor, handler) as channel:
        for size in (1, 300_000):
            await channel.send(ForwardResponse(hidden=torch.ones(size)), codec="float16")
            answer = await channel.receive(timeout_s=20.0)
            assert isinstance(answer, ForwardResponse)
            assert torch.equal(answer.hidden, torch.ones(size))
        assert acceptor.num_streams == 1
    assert acceptor.num_streams == 0
    assert seen == ["peer-x"]


async def test_a_peer_with_too_many_streams_is_told_so() -> None:
    acceptor = acceptor_with(max_streams=4)
    async with connected(acceptor, echo) as first:
        await first.send(InfoRequest())
        assert await first.receive(timeout_s=20.0) == InfoRequest()
        async with connected(acceptor, echo) as second:
            answer = await second.receive(timeout_s=20.0)
            assert isinstance(answer, Failure)
            assert answer.kind == "overloaded"
            assert "this client holds 1 streams here and all hold 1 of 4" in answer.message
            assert await second.receive(timeout_s=20.0) is None
        await first.send(InfoRequest())
        assert await first.receive(timeout_s=20.0) == InfoRequest()


async def test_all_peers_together_are_bounded_too() -> None:
    acceptor = acceptor_with(max_streams=1)
    async with connected(acceptor, echo), connected(acceptor, echo) as second:
        answer = await second.receive(timeout_s=20.0)
        assert isinstance(answer, Failure)
        assert "this client holds 1 streams here and all hold 1 of 1" in answer.message


def test_five_peers_that_take_all_they_get_leave_streams_for_others() -> None:
    acceptor = acceptor_with()
    for peer in ("a", "b", "c", "d", "e"):
        while acceptor._streams.room(peer):
            acceptor._streams.claim(peer, 1)
    assert acceptor._streams.room("honest") >= 20


@asynccontextmanager
async def third_in_place_of(
    first: Channel, second: Channel, acceptor: Acceptor, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[None]:
    """A third peer is refused while two have just talked, and gets the stream of the first when they are idle."""
    for channel in (first, second):
        await channel.send(InfoRequest())
        assert await channel.receive(timeout_s=20.0) == InfoRequest()
    async with connected(acceptor, echo, "three") as third:
        answer = await third.receive(timeout_s=20.0)
        assert isinstance(answer, Failure)
        assert refusal in answer.message
    monkeypatch.setattr(p2p_channel, "_IDLE_S", 0.0)
    async with connected(acceptor, echo, "three") as third:
        await third.send(InfoRequest())
        assert await third.receive(timeout_s=20.0) == InfoRequest()
        with pytest.raises(TransportError):
            await first.receive(timeout_s=20.0)
        yield


async def test_a_peer_without_a_stream_gets_that_of_the_idlest(monkeypatch: pytest.MonkeyPatch) -> None:
    acceptor = acceptor_with(max_streams=2)
    async with (
        connected(acceptor, echo, "one") as first,
        connected(acceptor, echo, "two") as second,
        third_in_place_of(first, second, acceptor, "all hold 2 of 2", monkeypatch),
    ):
        await second.send(InfoRequest())
        assert await second.receive(timeout_s=20.0) == InfoRequest()


async def test_no_stream_is_ended_for_a_peer_that_is_kept_out_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        def calling(self, peer: str, address: str) -> AbstractContextManager[None]:
            return nullcontext()

        def group(self, peer: str) -> str:
            return peer

        def is_known(self, peer: str) -> bool:
            return peer.startswith("friend")

    monkeypatch.setattr(p2p_channel, "_IDLE_S", 0.0)
    acceptor = acceptor_with(Known(), max_streams=16)  # one of them for friends
    for number in range(15):
        acceptor._streams.claim(f"peer {number}", 1)
    async with connected(acceptor, echo, "friend") as first:
        await first.send(InfoRequest())
        assert await first.receive(timeout_s=20.0) == InfoRequest()
        async with connected(acceptor, echo, "newcomer") as second:
            assert isinstance(await second.receive(timeout_s=20.0), Failure)
        await first.send(InfoRequest())
        assert await first.receive(timeout_s=20.0) == InfoRequest()


async def test_identities_of_one_address_replace_their_own_idle_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneAddress:
        @contextmanager
        def calling(self, peer: str, address: str) -> Iterator[None]:
            hosts[peer] = address
            yield

        def group(self, peer: str) -> str:
            return hosts[peer]

        def is_known(self, peer: str) -> bool:
            return False

    hosts: dict[str, str] = {}
    acceptor = acceptor_with(OneAddress(), max_streams=4)
    words = "holds 0 streams here, those of its address 2 and all hold 2 of 4"
    async with (
        connected(acceptor, echo, "one") as first,
        connected(acceptor, echo, "two") as second,
        third_in_place_of(first, second, acceptor, words, monkeypatch),
    ):
        pass
    assert set(hosts.values()) == {"/ip4/203.0.113.7"}


async def test_a_stream_that_lets_a_peer_in_is_ended_though_another_is_idler(monkeypatch: pytest.MonkeyPatch) -> None:
    class FirstLetter:
        def calling(self, peer: str, address: str) -> AbstractContextManager[None]:
            return nullcontext()

        def group(self, peer: str) -> str:
            return peer[0]

        def is_known(self, peer: str) -> bool:
            return False

    monkeypatch.setattr(p2p_channel, "_IDLE_S", 0.0)
    acceptor = acceptor_with(FirstLetter(), max_streams=2)
    async with connected(acceptor, echo, "another") as idler, connected(acceptor, echo, "mine") as own:
        for channel in (idler, own):
            await channel.send(InfoRequest())
            assert await channel.receive(timeout_s=20.0) == InfoRequest()
        async with connected(acceptor, echo, "mine too") as newcomer:
            await newcomer.send(InfoRequest())
            assert await newcomer.receive(timeout_s=20.0) == InfoRequest()
            await idler.send(InfoRequest())
            assert await idler.receive(timeout_s=20.0) == InfoRequest()


async def test_a_silent_stream_is_closed() -> None:
    called = []

    async def handler(channel: Channel) -> None:
        called.append(channel)

    with limited(FIRST_MESSAGE_TIMEOUT_S=0.1):
        acceptor = acceptor_with()
        async with connected(acceptor, handler) as channel:
            assert await channel.receive(timeout_s=20.0) is None
        assert acceptor.num_streams == 0
    assert not called


async def test_a_first_message_at_a_trickle_is_given_up() -> None:
    with limited(FIRST_MESSAGE_TIMEOUT_S=0.1, MIN_RECEIVE_BYTES_PER_S=1000.0):
        acceptor = acceptor_with()
        async with connected(acceptor, echo) as channel:
            transport = channel._check_usable()
            transport.write(struct.pack("<2sBBIQ", b"SW", 1, 0, 64, 1000))
            for _ in range(20):
                await asyncio.sleep(0.02)
                if transport.is_closing():
                    break
                transport.write(b"x")
            assert transport.is_closing()


def test_a_first_message_that_keeps_coming_may_take_longer_than_the_silence() -> None:
    async def main() -> None:
        # A hundred bytes are enough for the next second.
        acceptor = acceptor_with()
        async with connected(acceptor, echo) as channel:
            transport = channel._check_usable()
            payload = torch.arange(400, dtype=torch.uint8)
            data = b"".join(encode(SessionStep(hidden=payload, cached_tokens=0)))
            for start in range(0, len(data), 100):
                transport.write(data[start : start + 100])
                await asyncio.sleep(0.03)
            answer = await channel.receive(timeout_s=20.0)
            assert isinstance(answer, SessionStep)
            assert torch.equal(answer.hidden, payload)

    with limited(FIRST_MESSAGE_TIMEOUT_S=0.05, MIN_RECEIVE_BYTES_PER_S=100.0):
        virtual_time.run(main(), timeout_s=60)


async def test_a_handler_that_fails_answers_and_ends_its_stream(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(channel: Channel) -> None:
        await channel.receive(timeout_s=20.0)
        raise KeyError("oops")

    acceptor = acceptor_with()
    async with connected(acceptor, handler) as channel:
        await channel.send(InfoRequest())
        text = "the server failed (KeyError); its log says more"
        assert await channel.receive(timeout_s=20.0) == Failure(kind="internal", message=text)
        assert await channel.receive(timeout_s=20.0) is None
    assert acceptor.num_streams == 0
    assert "a handler failed on a stream of peer peer-x" in caplog.text


@pytest.mark.parametrize(
    ("rpc", "is_answered", "outcome"),
    [
        pytest.param("rpc_forward", False, "cancelled", id="given-up"),
        pytest.param("rpc_forward", True, "ended", id="nothing-to-do"),
        pytest.param("rpc_push", False, "ended", id="finished-all-the-same"),
    ],
)
async def test_a_request_is_given_up_when_its_client_leaves(rpc: str, is_answered: bool, outcome: str) -> None:
    begun, outcomes = asyncio.Event(), []

    async def handler(channel: Channel) -> None:
        assert await channel.receive(timeout_s=20.0) == InfoRequest()
        if is_answered:
            await channel.send(InfoRequest())
        begun.set()
        try:
            while channel._error is None:  # type: ignore[attr-defined]
                await asyncio.sleep(0.001)
            outcomes.append("ended")
        except asyncio.CancelledError:
            outcomes.append("cancelled")
            raise

    async with connected(acceptor_with(), handler, rpc=rpc) as channel:
        await channel.send(InfoRequest())
        await begun.wait()
    assert outcomes == [outcome]


async def test_a_malformed_message_ends_only_its_own_stream() -> None:
    acceptor = acceptor_with()
    async with connected(acceptor, echo) as good, connected(acceptor, echo) as bad:
        bad._check_usable().write(b"\xff" * 100)
        with pytest.raises(TransportError, match="broke"):
            await bad.receive(timeout_s=20.0)
        await good.send(InfoRequest())
        assert await good.receive(timeout_s=20.0) == InfoRequest()


async def test_close_cancels_all_handlers() -> None:
    acceptor = acceptor_with()
    async with connected(acceptor, echo) as channel:
        await channel.send(InfoRequest())
        assert await channel.receive(timeout_s=20.0) == InfoRequest()
        await acceptor.close()
        assert acceptor.num_streams == 0
        assert await channel.receive(timeout_s=20.0) is None


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        pytest.param(
            p2pd_pb2.Response(type=p2pd_pb2.Response.ERROR, error=p2pd_pb2.ErrorResponse(msg="no addresses")),
            rf"^peer {PEER_ID} cannot be reached: no addresses$",
            id="peer",
        ),
        pytest.param(None, r"own libp2p daemon does not answer", id="daemon"),
    ],
)
async def test_an_unreachable_peer_is_told_from_a_dead_daemon(
    reply: p2pd_pb2.Response | None, text: str, tmp_path: Path
) -> None:
    async def daemon(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if reply is not None:
            await read_pbmsg_safe(reader, p2pd_pb2.Request())
            await write_pbmsg(writer, reply)
        writer.close()

    path = str(tmp_path / "daemon")
    server = await asyncio.start_unix_server(daemon, path)
    try:
        with pytest.raises(TransportError, match=text):
            await open_channel(path, PEER_ID, "/x", timeout_s=5.0, ledger=Ledger(1 << 20))
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    ("message", "text"),
    [
        pytest.param(
            f"failed to dial: failed to dial {PEER_ID}: all dials failed\n"
            "  * [/ip4/127.0.0.1/tcp/9] dial tcp4 127.0.0.1:9: connect: connection refused\n"
            "  * [/ip6/::1/udp/9/quic] timeout: no recent network activity",
            "/ip4/127.0.0.1/tcp/9: connection refused; /ip6/::1/udp/9/quic: timeout: no recent network activity",
            id="addresses",
        ),
        pytest.param(f"failed to dial {PEER_ID}: no good addresses", "no good addresses", id="none"),
        pytest.param("failed to dial: dial to self attempted", "dial to self attempted", id="self"),
        pytest.param("routing: not found", "its address is not known", id="unknown"),
        pytest.param("", "the libp2p daemon gives no reason", id="empty"),
    ],
)
def test_an_unreachable_peer_is_one_sentence(message: str, text: str) -> None:
    error = dial_error(PEER_ID, message)
    assert str(error) == f"peer {PEER_ID} cannot be reached: {text}"
    assert not isinstance(error, BackoffError)


def test_an_address_that_is_not_tried_again_yet_is_told_from_one_that_failed() -> None:
    message = f"failed to dial: failed to dial {PEER_ID}: all dials failed\n  * [/ip4/127.0.0.1/tcp/9] dial backoff"
    error = dial_error(PEER_ID, message)
    assert isinstance(error, BackoffError)
    assert str(error) == f"peer {PEER_ID} cannot be reached: /ip4/127.0.0.1/tcp/9: failed a moment ago"
