"""A server of many clients and requests: all advance together, and afterwards it holds what it held before."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from fake_server import transport_to

from swarm_plugins.blocks.load import load_span
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.server.assembly import assembled
from swarm_plugins.server.compute import rhythm
from swarm_plugins.server.hosted import HostedSpans
from swarm_plugins.server.service import Service
from swarm_plugins.testing import save_tiny
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    Failure,
    ForwardRequest,
    ForwardResponse,
    Message,
    SessionOpen,
    SessionOpened,
    SessionStep,
    SessionStepResponse,
)

NUM_CLIENTS, NUM_STEPS, WIDTH = 20, 20, 32


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(rhythm, "_MAX_SESSIONS", 8)  # remembered after their end, so soon as many as there may be
    checkpoint = Checkpoint.open(save_tiny("llama", tmp_path))
    spans = HostedSpans(load_span(checkpoint, range(4)))
    service = assembled(checkpoint, spans)
    yield service
    service.scheduler.close()
    spans.close()


async def asked(transport: LocalTransport, peer: str, rpc: str, *requests: Message) -> list[Message | None]:
    """Returns the answers to requests on a stream of their own."""
    channel = await transport.seen_from(peer).open("server", rpc, timeout_s=5)
    answers = []
    for request in requests:
        await channel.send(request)
        answers.append(await channel.receive(timeout_s=30))
    await channel.close()
    return answers


async def until_idle(service: Service) -> None:
    async with asyncio.timeout(20):
        while len(service.sessions) or service.scheduler.num_waiting or service.ledger.used:
            await asyncio.sleep(0.001)
    await service.scheduler.call(lambda: None, timeout_s=5)  # caches are closed by now: calls keep their order


def opening(service: Service) -> SessionOpen:
    return SessionOpen(version=service.version, start=0, end=4, batch_size=1)


async def test_twenty_clients_at_once_advance_together_and_leave_nothing(service: Service) -> None:
    transport = transport_to(service, "alice")
    free_before, done = service.runner.free_tokens(), Counter[str]()
    least_when_one_was_ready = list[int]()

    async def play(peer: str) -> None:
        channel = await transport.seen_from(peer).open("server", "rpc_session", timeout_s=5)
        await channel.send(opening(service))
        assert isinstance(await channel.receive(timeout_s=30), SessionOpened)
        cached = 0
        for num_tokens in (16, *[1] * NUM_STEPS):
            await channel.send(SessionStep(hidden=torch.randn(1, num_tokens, WIDTH), cached_tokens=cached))
            assert isinstance(await channel.receive(timeout_s=30), SessionStepResponse)
            cached += num_tokens
            done[peer] += 1
        least_when_one_was_ready.append(min(done[f"client {one}"] for one in range(NUM_CLIENTS)))
        await channel.close()

    await asyncio.gather(*(play(f"client {number}") for number in range(NUM_CLIENTS)))
    assert least_when_one_was_ready[0] >= NUM_STEPS // 2, "when the first was ready, no other was far behind"
    assert max(service.scheduler.packs) > NUM_CLIENTS // 2, "their steps shared forwards"
    await until_idle(service)
    assert service.runner.free_tokens() == free_before
    await transport.close()


def held() -> Counter[str]:
    """Returns how many objects of this package, tensors, tasks and open files there are."""
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    found = Counter({str(kind): number for kind, number in kinds.items() if "swarm_plugins" in str(kind.__module__)})
    found["tensors"] = kinds[torch.Tensor]
    found["tasks"] = len(asyncio.all_tasks())
    found["files"] = len(os.listdir("/proc/self/fd"))
    return found


@pytest.mark.slow
async def test_three_hundred_requests_leave_nothing(service: Service) -> None:
    transport, hidden = transport_to(service, "alice"), torch.randn(1, 4, WIDTH)
    forward = ForwardRequest(version=service.version, start=0, end=4, hidden=hidden, keep=True)
    step = SessionStep(hidden=hidden, cached_tokens=0)

    async def round_of_six(peer: str) -> None:
        (answer,) = await asked(transport, peer, "rpc_forward", forward)
        assert isinstance(answer, ForwardResponse)
        backward = BackwardRequest(ticket=answer.ticket, grad_hidden=hidden)
        (answer,) = await asked(transport, peer, "rpc_backward", backward)
        assert isinstance(answer, BackwardResponse)
        *_, answer = await asked(transport, peer, "rpc_session", opening(service), step)
        assert isinstance(answer, SessionStepResponse)
        wrong = msgspec.structs.replace(forward, version="another")
        for rpc, request in (("rpc_forward", wrong), ("rpc_session", step), ("rpc_push", step)):
            (answer,) = await asked(transport, peer, rpc, request)
            assert isinstance(answer, Failure)

    async def rounds(count: int) -> Counter[str]:
        for number in range(count):
            await round_of_six(f"client {number % 5}")
        await until_idle(service)
        return held()

    before = await rounds(10)
    after = await rounds(50)
    assert after - before == Counter()
    await transport.close()
