"""``rpc_push``: only by whom the client allows, only for the step it is for, only once; the rest is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import torch
from fake_server import WIDTH
from session_kit import ADDED, OPEN, ask, playing, step_of

from swarm_plugins.server import limits
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.pushes import Pushes
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.admission.pushing import push_token
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.codec import tensor_hash
from swarm_plugins.transport.messages import (
    Failure,
    Message,
    PushedHidden,
    PushTo,
    SessionOpened,
    SessionStepResponse,
)

NAME, KEY = "chosen by alice", bytes(range(32))
PUSHING = msgspec.structs.replace(OPEN, push_name=NAME, push_key=KEY)
AWAITED = msgspec.structs.replace(step_of(1, 0), hidden=torch.zeros(1, 1, 0), pushed_bytes=4 * WIDTH)


@pytest.fixture(autouse=True)
def _reaches_others(service: Service) -> None:
    service.pushes = Pushes(LocalTransport({}))


async def opened(channel: Channel) -> SessionOpened:
    answer = await ask(channel, PUSHING)
    assert isinstance(answer, SessionOpened)
    return answer


def pushed(sender: str, step: int = 0, *, value: float = 2.0, **changes: Any) -> PushedHidden:
    message = PushedHidden(
        session=NAME,
        step=step,
        token=push_token(KEY, sender, step),
        hidden=torch.full((1, 1, WIDTH), value),
    )
    return msgspec.structs.replace(message, **changes)


async def push(transport: LocalTransport, sender: str, message: Message) -> Channel:
    channel = await transport.seen_from(sender).open("server", "rpc_push", timeout_s=5)
    await channel.send(message)
    return channel


async def test_a_step_takes_what_the_allowed_server_pushes(service: Service) -> None:
    async with playing(service) as (channel, transport):
        await opened(channel)
        before = await push(transport, "bob", pushed("bob"))
        first = await ask(channel, AWAITED)
        assert isinstance(first, SessionStepResponse)
        assert float(first.hidden[0, 0, 0]) == 2.0 + ADDED
        assert first.input_hash == tensor_hash(torch.full((1, 1, WIDTH), 2.0))
        # One of its own, then one that comes while the step waits.
        await ask(channel, step_of(1, 1))
        await channel.send(msgspec.structs.replace(AWAITED, cached_tokens=2))
        await asyncio.sleep(0.05)
        await before.send(pushed("bob", 2, value=5.0))
        third = await channel.receive(timeout_s=5)
        assert isinstance(third, SessionStepResponse)
        assert float(third.hidden[0, 0, 0]) == 5.0 + ADDED
    assert (service.pushes.num_taken, service.pushes.num_refused) == (2, 0)


async def test_the_client_itself_may_push_without_a_token(service: Service) -> None:
    async with playing(service) as (channel, transport):
        await opened(channel)
        await push(transport, "alice", pushed("alice", token=b""))
        assert isinstance(await ask(channel, AWAITED), SessionStepResponse)


@pytest.mark.parametrize(
    ("sender", "changes", "kind", "words"),
    [
        pytest.param("eve", {}, "refused", "may not push step 0", id="token of another peer"),
        pytest.param("bob", {"token": b""}, "refused", "may not push", id="no token"),
        pytest.param("bob", {"token": bytes(32)}, "refused", "may not push", id="forged token"),
        pytest.param("bob", {"step": 1}, "refused", "may not push step 1", id="token of another step"),
        pytest.param("bob", {"session": "guess"}, "refused", "may not push", id="unknown session"),
        pytest.param("bob", {"hidden": torch.zeros(1, 1, WIDTH + 1)}, "bad_request", "hidden has shape", id="width"),
        pytest.param("bob", {"hidden": torch.full((1, 1, WIDTH), torch.nan)}, "not_finite", "NaN", id="not finite"),
    ],
)
async def test_who_may_not_push_is_refused(
    service: Service, sender: str, changes: dict[str, Any], kind: str, words: str
) -> None:
    async with playing(service) as (channel, transport):
        await opened(channel)
        stream = await push(transport, sender, msgspec.structs.replace(pushed("bob"), **changes))
        answer = await stream.receive(timeout_s=5)
        assert isinstance(answer, Failure)
        assert answer.kind == kind
        assert words in answer.message
        assert await stream.receive(timeout_s=5) is None, "the stream is over"
        # The session is not.
        await push(transport, "bob", pushed("bob"))
        assert isinstance(await ask(channel, AWAITED), SessionStepResponse)
    assert service.pushes.num_refused == 1


@pytest.mark.parametrize(
    ("step", "words"), [(0, "is at step 2"), (1, "is at step 2"), (10, "is at step 2")], ids=["over", "replay", "far"]
)
async def test_steps_that_are_over_or_far_ahead_are_refused(service: Service, step: int, words: str) -> None:
    async with playing(service) as (channel, transport):
        await opened(channel)
        await ask(channel, step_of(1, 0))
        await push(transport, "bob", pushed("bob", 1))
        await ask(channel, msgspec.structs.replace(AWAITED, cached_tokens=1))
        answer = await (await push(transport, "bob", pushed("bob", step))).receive(timeout_s=5)
        assert isinstance(answer, Failure)
        assert words in answer.message


async def test_a_step_is_pushed_once(service: Service) -> None:
    async with playing(service) as (channel, transport):
        await opened(channel)
        await push(transport, "bob", pushed("bob", value=2.0))
        await asyncio.sleep(0.05)
        second = await push(transport, "bob", pushed("bob", value=3.0))
        assert isinstance(await second.receive(timeout_s=5), Failure)
        answer = await ask(channel, AWAITED)
        assert isinstance(answer, SessionStepResponse)
        assert float(answer.hidden[0, 0, 0]) == 2.0 + ADDED


async def test_neither_side_waits_for_ever(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SESSION_LEASE_S", 0.1)
    async with playing(service) as (channel, transport):
        await opened(channel)
        answer = await ask(channel, AWAITED)
        assert isinstance(answer, Failure)
        assert answer.kind == "not_pushed"
        answer = await (await push(transport, "bob", pushed("bob", 1))).receive(timeout_s=5)
        assert isinstance(answer, Failure)
        assert answer.kind == "not_pushed"


async def test_sessions_take_nothing_that_their_client_did_not_ask_for(service: Service) -> None:
    async with playing(service) as (channel, transport):
        assert isinstance(await ask(channel, OPEN), SessionOpened)
        answer = await (await push(transport, "bob", pushed("bob"))).receive(timeout_s=5)
        assert isinstance(answer, Failure)
        assert answer.kind == "refused"


async def test_a_server_that_cannot_be_reached_costs_only_the_push(service: Service) -> None:
    async with playing(service) as (channel, _):
        await opened(channel)
        to = PushTo(peer="nobody", session="s", step=0, token=b"")
        answer = await ask(channel, msgspec.structs.replace(step_of(1, 0), push_to=to))
        assert isinstance(answer, SessionStepResponse)
        assert "nobody cannot be reached" in answer.not_pushed
        assert isinstance(await ask(channel, step_of(1, 1)), SessionStepResponse)


class NobodyAnswers:
    """Opens streams for ever."""

    def __init__(self) -> None:
        self.num_opening = 0

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        self.num_opening += 1
        try:
            await asyncio.sleep(3600)
        finally:
            self.num_opening -= 1
        raise AssertionError


async def test_an_output_on_its_way_counts_and_a_session_has_one_at_most(service: Service) -> None:
    nobody = NobodyAnswers()
    service.pushes = Pushes(nobody)
    async with playing(service) as (channel, _):
        await opened(channel)
        for step in range(3):
            to = PushTo(peer=f"peer{step}", session="s", step=step, token=b"")
            answer = await ask(channel, msgspec.structs.replace(step_of(1, step), push_to=to))
            assert isinstance(answer, SessionStepResponse)
            assert answer.not_pushed == ""
            await asyncio.sleep(0.01)
            assert nobody.num_opening == 1
        assert service.ledger.used >= 4 * WIDTH
    assert nobody.num_opening == 0
    assert service.ledger.used == 0
