"""Clients and servers that misuse ``rpc_push`` harm nobody else: names, rooms and streams of others stay theirs."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import torch
from fake_server import VERSION, WIDTH
from session_kit import ADDED, OPEN, ask, playing, step_of

from swarm_plugins.errors import ProtocolError
from swarm_plugins.server.rpc import push as push_module
from swarm_plugins.server.service import Service
from swarm_plugins.server.state import pushes as pushes_module
from swarm_plugins.server.state.pushes import Pushes
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.admission.pushing import push_token
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import (
    Failure,
    ForwardRequest,
    ForwardResponse,
    Message,
    PushedHidden,
    PushSlot,
    PushTo,
    SessionOpened,
    SessionStepResponse,
)
from swarm_plugins.transport.wire import decode, encode

NAME, KEY, OTHER_KEY = "chosen by alice", bytes(range(32)), bytes(32)
PUSHING = msgspec.structs.replace(OPEN, push_name=NAME, push_key=KEY)
AWAITED = msgspec.structs.replace(step_of(1, 0), hidden=torch.zeros(1, 1, 0), pushed_bytes=4 * WIDTH)
FORWARD = ForwardRequest(
    version=VERSION,
    start=2,
    end=6,
    hidden=torch.zeros(1, 1, 0),
    pushed=PushSlot(name=NAME, step=0, key=KEY, num_bytes=4 * WIDTH),
)


@pytest.fixture(autouse=True)
def _reaches_others(service: Service) -> None:
    service.pushes = Pushes(LocalTransport({}))


async def stream_of(transport: LocalTransport, peer: str, rpc: str = "rpc_session") -> Channel:
    return await transport.seen_from(peer).open("server", rpc, timeout_s=5)


async def pushing(transport: LocalTransport, sender: str, key: bytes = KEY, *, value: float = 2.0) -> Channel:
    """Pushes step 0."""
    channel = await stream_of(transport, sender, "rpc_push")
    hidden = torch.full((1, 1, WIDTH), value)
    await channel.send(PushedHidden(session=NAME, step=0, token=push_token(key, sender, 0), hidden=hidden))
    return channel


def value_of(answer: Message | None) -> float:
    assert isinstance(answer, SessionStepResponse)
    return float(answer.hidden[0, 0, 0]) - ADDED


async def test_a_session_whose_name_is_taken_is_none(service: Service) -> None:
    """Its cache would be in no list: no budget would count it, and no lease would end it."""
    async with playing(service) as (channel, transport):
        assert isinstance(await ask(channel, PUSHING), SessionOpened)
        second = await stream_of(transport, "alice")
        answer = await ask(second, PUSHING)
        assert isinstance(answer, Failure)
        assert "choose random names" in answer.message
        answer = await ask(second, step_of(50, 0))
        assert isinstance(answer, Failure)
        assert answer.kind == "unknown_session"
        assert isinstance(await ask(second, OPEN), SessionOpened), "another name will do, on the same stream, too"
    assert service.runner.open_caches == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
async def test_whoever_takes_a_clients_name_takes_nothing_from_its_session(service: Service, is_first: bool) -> None:
    """Servers that push know the name of the session to which they do, and could open their own under it."""
    async with playing(service) as (channel, transport):
        eve = await stream_of(transport, "eve")
        openings = [(eve, msgspec.structs.replace(PUSHING, push_key=OTHER_KEY)), (channel, PUSHING)]
        for one, request in openings if is_first else reversed(openings):
            assert isinstance(await ask(one, request), SessionOpened)
        await pushing(transport, "bob")
        await pushing(transport, "mallory", OTHER_KEY, value=7.0)
        assert value_of(await ask(channel, AWAITED)) == 2.0
        assert value_of(await ask(eve, AWAITED)) == 7.0
        assert service.pushes.num_refused == 0


@pytest.mark.parametrize("rpc", ["rpc_session", "rpc_forward"])
async def test_whoever_takes_a_clients_name_takes_nothing_from_its_requests(service: Service, rpc: str) -> None:
    async with playing(service) as (_, transport):
        eve = await stream_of(transport, "eve", rpc)
        if rpc == "rpc_session":
            assert isinstance(await ask(eve, msgspec.structs.replace(PUSHING, push_key=OTHER_KEY)), SessionOpened)
        else:
            assert FORWARD.pushed is not None
            slot = msgspec.structs.replace(FORWARD.pushed, key=OTHER_KEY)
            await eve.send(msgspec.structs.replace(FORWARD, pushed=slot))
            await pushing(transport, "mallory", bytes(range(1, 33)))  # refused: by then eve's request waits
        forward = await stream_of(transport, "alice", "rpc_forward")
        await forward.send(FORWARD)
        await pushing(transport, "bob")
        assert isinstance(await forward.receive(timeout_s=5), ForwardResponse)


async def test_what_was_pushed_once_opens_no_later_session(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_module, "_LONGEST_PAUSE_S", 0.01)
    async with playing(service) as (channel, transport):
        assert isinstance(await ask(channel, PUSHING), SessionOpened)
        replayed = await pushing(transport, "bob")
        assert value_of(await ask(channel, AWAITED)) == 2.0
        step = PushedHidden(session=NAME, step=0, token=push_token(KEY, "bob", 0), hidden=torch.zeros(1, 1, WIDTH))
        answer = await ask(replayed, step)
        assert isinstance(answer, Failure)
        assert "is at step 1" in answer.message, "the step is over"
        await channel.close()
        await until_none(service)
        answer = await ask(await stream_of(transport, "bob", "rpc_push"), step)
        assert isinstance(answer, Failure)
        assert "may not push step 0" in answer.message, "so is the session"
        again = await stream_of(transport, "alice")
        assert isinstance(await ask(again, msgspec.structs.replace(PUSHING, push_key=OTHER_KEY)), SessionOpened)
        answer = await ask(await stream_of(transport, "bob", "rpc_push"), step)
        assert isinstance(answer, Failure)
        assert "may not push step 0" in answer.message, "each session has a secret of its own, whatever its name"
        await again.close()
        await until_none(service)
        assert not service.inboxes._named
        assert not service.ledger.used


async def test_pushes_without_number_wait_for_no_room_but_their_senders(service: Service) -> None:
    async with playing(service) as (channel, transport):
        assert isinstance(await ask(channel, PUSHING), SessionOpened)
        channels = [await stream_of(transport, "alice", "rpc_push") for _ in range(40)]
        for step, one in enumerate(channels):
            await one.send(PushedHidden(session=NAME, step=step, hidden=torch.full((1, 1, WIDTH), 2.0)))
        refused = [one for one in channels[8:] if isinstance(await one.receive(timeout_s=5), Failure)]
        assert len(refused) == 32, "eight steps may come before their turn"
        [inbox] = service.inboxes._named[NAME].values()
        assert len(inbox._early) == 8
        assert value_of(await ask(channel, AWAITED)) == 2.0


async def until_none(service: Service) -> None:
    """Returns when no session is open."""
    async with asyncio.timeout(10):
        while len(service.sessions):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("hidden", [torch.zeros(1, 2, WIDTH), torch.zeros(1, 1, WIDTH).half()], ids=["shape", "dtype"])
@pytest.mark.parametrize("is_early", [True, False], ids=["early", "awaited"])
async def test_what_does_not_fit_fails_for_its_sender_and_not_for_the_step(
    service: Service, hidden: torch.Tensor, is_early: bool
) -> None:
    """Its client would blame this server for a refusal that another one has caused."""
    async with playing(service) as (channel, transport):
        assert isinstance(await ask(channel, PUSHING), SessionOpened)
        if not is_early:
            await channel.send(AWAITED)
            await waiting(service)
        wrong = await stream_of(transport, "bob", "rpc_push")
        await wrong.send(PushedHidden(session=NAME, step=0, token=push_token(KEY, "bob", 0), hidden=hidden))
        if is_early:
            await asyncio.sleep(0.05)
            await channel.send(AWAITED)
        refusal = await wrong.receive(timeout_s=5)
        assert isinstance(refusal, Failure)
        assert "was pushed for a request of [1, 1, 0] and 16 bytes" in refusal.message
        await pushing(transport, "alice")
        assert value_of(await channel.receive(timeout_s=5)) == 2.0
    assert service.pushes.num_refused == 1


async def waiting(service: Service) -> None:
    """Returns when the only session waits for its input."""
    async with asyncio.timeout(10):
        while not any(session.is_busy for session in service.sessions._sessions.values()):
            await asyncio.sleep(0.001)


class Slow:
    """Opens streams, and sends over them, when it may."""

    def __init__(self) -> None:
        self.may_open, self.may_send = asyncio.Event(), asyncio.Event()
        self.may_send.set()
        self.opening: list[str] = []
        self.num_open = 0
        self.sent: list[PushedHidden] = []
        self.remote_peer = "carol"

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        self.opening.append(peer)
        try:
            await self.may_open.wait()
        finally:
            self.opening.remove(peer)
        self.num_open += 1
        return self

    async def send(self, message: Message, *, codec: str = "none") -> None:
        await self.may_send.wait()
        assert isinstance(message, PushedHidden)
        self.sent.append(message)

    async def receive(self, *, timeout_s: float) -> Message | None:
        return None

    async def close(self) -> None:
        self.num_open -= 1


async def test_outputs_on_their_way_end_only_with_the_session_of_their_client(service: Service) -> None:
    """A server of a chain knows what its client calls the others, and could name the same to another server."""
    to = PushTo(peer="carol", session=NAME, step=0, token=b"")
    async with playing(service) as (channel, transport):
        slow = Slow()
        service.pushes = Pushes(slow)
        assert isinstance(await ask(channel, OPEN), SessionOpened)
        assert isinstance(await ask(channel, msgspec.structs.replace(step_of(1, 0), push_to=to)), SessionStepResponse)
        eve = await stream_of(transport, "eve")
        assert isinstance(await ask(eve, OPEN), SessionOpened)
        assert isinstance(await ask(eve, msgspec.structs.replace(step_of(1, 0), push_to=to)), SessionStepResponse)
        await eve.close()
        async with asyncio.timeout(10):
            while len(service.sessions) > 1 or len(slow.opening) > 1:
                await asyncio.sleep(0.001)
        slow.may_open.set()
        async with asyncio.timeout(10):
            while not slow.sent:
                await asyncio.sleep(0.001)


async def test_one_client_lets_a_server_call_few_others_at_once(service: Service) -> None:
    async with playing(service) as (_, transport):
        slow = Slow()
        service.pushes = Pushes(slow)
        forward = await stream_of(transport, "eve", "rpc_forward")
        plain = ForwardRequest(version=VERSION, start=2, end=6, hidden=torch.ones(1, 1, WIDTH))
        told = []
        for number in range(40):
            to = PushTo(peer=f"victim {number}", session=NAME, step=0, token=b"")
            answer = await ask(forward, msgspec.structs.replace(plain, push_to=to))
            assert isinstance(answer, ForwardResponse)
            told.append(answer.not_pushed)
        assert len(slow.opening) <= 16
        assert sum(not one for one in told) <= 16
        assert "streams to other servers" in told[-1]
        honest = await stream_of(transport, "alice", "rpc_forward")
        to = PushTo(peer="carol", session=NAME, step=0, token=b"")
        answer = await ask(honest, msgspec.structs.replace(plain, push_to=to))
        assert isinstance(answer, ForwardResponse)
        assert answer.not_pushed == ""


async def test_one_client_has_a_part_of_the_streams_to_other_servers(service: Service) -> None:
    async with playing(service):
        slow = Slow()
        slow.may_open.set()
        pushes = Pushes(slow)

        async def push(client: str, session: str) -> str:
            to = PushTo(peer="carol", session=session, step=0, token=b"")
            return await pushes.send(client, to, torch.ones(1), "none", service.ledger.charge(client))

        assert await push("alice", NAME) == ""
        for number in range(100):
            assert await push("eve", f"session {number}") == "", "her oldest is closed"
        await asyncio.sleep(0)  # until it is
        assert slow.num_open <= 65
        slow.may_open.clear()
        assert await push("alice", NAME) == ""
        assert not slow.opening, "hers was not"


async def test_who_takes_outputs_slowly_keeps_no_memory_of_their_client(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushes_module, "_SEND_S", 0.1)
    async with playing(service):
        slow = Slow()
        slow.may_open.set()
        slow.may_send.clear()
        pushes, to = Pushes(slow), PushTo(peer="carol", session=NAME, step=0, token=b"")
        for _ in range(3):
            await pushes.send("alice", to, torch.ones(8), "none", service.ledger.charge("alice"))
        async with asyncio.timeout(10):
            while service.ledger.used or slow.num_open:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "message",
    [
        PushedHidden(session="n" * 65, step=0, hidden=torch.zeros(1, 1, 1)),
        msgspec.structs.replace(step_of(1, 0), push_to=PushTo(peer="bob", session="n" * 65, step=0, token=b"")),
        msgspec.structs.replace(step_of(1, 0), push_to=PushTo(peer="p" * 129, session=NAME, step=0, token=b"")),
    ],
    ids=["pushed", "session", "peer"],
)
def test_names_are_short(message: Message) -> None:
    """Servers keep those of their streams to others."""
    with pytest.raises(ProtocolError, match="length"):
        decode(b"".join(encode(message)))
