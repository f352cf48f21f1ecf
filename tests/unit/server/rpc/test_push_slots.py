"""Forwards and backwards whose input another server pushes: only what the client allows, once, of the right size."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import torch
from fake_server import VERSION, WIDTH
from session_kit import playing

from swarm_plugins.server import limits
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.pushes import Pushes
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.admission.pushing import push_token
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.codec import tensor_hash
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    Failure,
    ForwardRequest,
    ForwardResponse,
    PushedHidden,
    PushSlot,
)

FACTOR = 3.0 * 4 * 5 * 6  # block b multiplies by b + 1
INPUT = torch.full((1, 2, WIDTH), 2.0)
KEY = bytes(range(32))
SLOT = PushSlot(name="lane", step=7, key=KEY, num_bytes=INPUT.nbytes)
AWAITED = ForwardRequest(version=VERSION, start=2, end=6, hidden=INPUT[:, :, :0], pushed=SLOT)


@pytest.fixture(autouse=True)
def _reaches_others(service: Service) -> None:
    service.pushes = Pushes(LocalTransport({}))


def pushed(**changes: Any) -> PushedHidden:
    message = PushedHidden(session="lane", step=7, token=push_token(KEY, "bob", 7), hidden=INPUT)
    return msgspec.structs.replace(message, **changes)


async def asked(transport: LocalTransport, request: ForwardRequest | BackwardRequest, by: str = "alice") -> Channel:
    rpc = "rpc_forward" if isinstance(request, ForwardRequest) else "rpc_backward"
    channel = await transport.seen_from(by).open("server", rpc, timeout_s=5)
    await channel.send(request)
    return channel


async def awaited(
    service: Service, transport: LocalTransport, request: ForwardRequest | BackwardRequest = AWAITED
) -> Channel:
    """Asks, and returns when the server waits for the input."""
    channel = await asked(transport, request)
    assert request.pushed is not None
    async with asyncio.timeout(10):
        mine = pushed(step=request.pushed.step)
        while service.inboxes.find(mine, "alice") is None:
            await asyncio.sleep(0.001)
    return channel


async def push(transport: LocalTransport, sender: str, message: PushedHidden) -> Channel:
    channel = await transport.seen_from(sender).open("server", "rpc_push", timeout_s=5)
    await channel.send(message)
    return channel


async def test_a_forward_and_a_backward_take_what_the_allowed_server_pushes(service: Service) -> None:
    async with playing(service) as (_, transport):
        forward = await awaited(service, transport, msgspec.structs.replace(AWAITED, keep=True))
        stream = await push(transport, "bob", pushed())
        answer = await forward.receive(timeout_s=5)
        assert isinstance(answer, ForwardResponse)
        assert answer.hidden.equal(INPUT * FACTOR)
        assert answer.input_hash == tensor_hash(INPUT)
        slot = PushSlot(name="lane", step=8, key=KEY, num_bytes=INPUT.nbytes)
        backward = await awaited(
            service, transport, BackwardRequest(ticket=answer.ticket, grad_hidden=INPUT[:, :, :0], pushed=slot)
        )
        await stream.send(pushed(step=8, token=push_token(KEY, "bob", 8)))
        found = await backward.receive(timeout_s=5)
        assert isinstance(found, BackwardResponse)
        assert found.grad_hidden is not None
        assert found.grad_hidden.equal(INPUT * FACTOR)
    assert (service.pushes.num_taken, service.pushes.num_refused) == (2, 0)


async def test_the_client_itself_may_push_without_a_token(service: Service) -> None:
    async with playing(service) as (_, transport):
        forward = await awaited(service, transport)
        await push(transport, "alice", pushed(token=b""))
        assert isinstance(await forward.receive(timeout_s=5), ForwardResponse)


@pytest.mark.parametrize(
    ("sender", "changes"),
    [
        pytest.param("eve", {}, id="token of another peer"),
        pytest.param("bob", {"token": b""}, id="no token"),
        pytest.param("bob", {"token": bytes(32)}, id="forged token"),
        pytest.param("bob", {"step": 8}, id="another step"),
        pytest.param("bob", {"session": "guess"}, id="unknown name"),
    ],
)
async def test_who_may_not_push_is_refused(service: Service, sender: str, changes: dict[str, Any]) -> None:
    async with playing(service) as (_, transport):
        forward = await awaited(service, transport)
        answer = await (await push(transport, sender, pushed(**changes))).receive(timeout_s=5)
        assert isinstance(answer, Failure)
        assert (answer.kind, "may not push" in answer.message) == ("refused", True)
        await push(transport, "bob", pushed())
        assert isinstance(await forward.receive(timeout_s=5), ForwardResponse), "the request still waits"
    assert service.pushes.num_refused == 1


async def test_what_overtakes_the_request_waits_a_moment_and_nothing_is_taken_twice(service: Service) -> None:
    async with playing(service) as (_, transport):
        await push(transport, "bob", pushed())
        await asyncio.sleep(0.02)
        forward = await asked(transport, AWAITED)
        assert isinstance(await forward.receive(timeout_s=5), ForwardResponse)
        late = await push(transport, "bob", pushed())
        assert isinstance(await late.receive(timeout_s=5), Failure)
    assert (service.pushes.num_taken, service.pushes.num_refused) == (1, 1)


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        (INPUT[:, :1], r"of shape \[1, 1, 4\] and 16 bytes was pushed for a request of \[1, 2, 0\] and 32 bytes"),
        (INPUT.half(), "and 16 bytes was pushed"),
    ],
    ids=["shape", "dtype"],
)
async def test_what_is_pushed_must_fit_the_request(service: Service, hidden: torch.Tensor, words: str) -> None:
    async with playing(service) as (_, transport):
        forward = await awaited(service, transport)
        answer = await (await push(transport, "bob", pushed(hidden=hidden))).receive(timeout_s=5)
        assert isinstance(answer, Failure)
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(answer.message)
        await push(transport, "bob", pushed())
        assert isinstance(await forward.receive(timeout_s=5), ForwardResponse), "the request still waits"


async def test_a_name_is_one_request_of_a_client_at_a_time(service: Service) -> None:
    async with playing(service) as (_, transport):
        forward = await awaited(service, transport)
        second = await asked(transport, AWAITED)
        answer = await second.receive(timeout_s=5)
        assert isinstance(answer, Failure)
        assert "count the requests" in answer.message
        await push(transport, "bob", pushed())
        assert isinstance(await forward.receive(timeout_s=5), ForwardResponse)


async def test_a_request_does_not_wait_for_ever(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SESSION_LEASE_S", 0.1)
    async with playing(service) as (_, transport):
        answer = await (await asked(transport, AWAITED)).receive(timeout_s=5)
        assert isinstance(answer, Failure)
        assert answer.kind == "not_pushed"


async def test_a_forward_inside_of_a_backward_brings_its_input(service: Service) -> None:
    async with playing(service) as (_, transport):
        answer = await (await asked(transport, BackwardRequest(forward=AWAITED, grad_hidden=INPUT))).receive(
            timeout_s=5
        )
        assert isinstance(answer, Failure)
        assert answer.kind == "bad_request"
