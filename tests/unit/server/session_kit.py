"""A session stream of a fake server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import torch
from fake_server import VERSION, WIDTH, transport_to

from swarm_plugins.server.service import Service
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import (
    Message,
    SessionOpen,
    SessionStep,
)

ADDED = 3 + 4 + 5 + 6
OPEN = SessionOpen(version=VERSION, start=2, end=6, batch_size=1)


def step_of(num_tokens: int, cached: int, *, batch_size: int = 1, value: float = 1.0, **fields: object) -> SessionStep:
    hidden = torch.full((batch_size, num_tokens, WIDTH), value)
    return SessionStep(hidden=hidden, cached_tokens=cached, **fields)  # type: ignore[arg-type]


async def ask(channel: Channel, message: Message) -> Message:
    await channel.send(message)
    answer = await channel.receive(timeout_s=5)
    assert answer is not None
    return answer


@contextlib.asynccontextmanager
async def playing(service: Service, *, client: str = "alice") -> AsyncIterator[tuple[Channel, LocalTransport]]:
    transport = transport_to(service, client)
    channel = await transport.open("server", "rpc_session", timeout_s=5)
    try:
        yield channel, transport
    finally:
        await transport.close()
        await service.scheduler.call(lambda: None, timeout_s=5)  # closing is done by now: calls keep their order
