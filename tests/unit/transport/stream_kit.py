"""Streams over pairs of sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import pytest
import torch

from swarm_plugins.ledger import Ledger
from swarm_plugins.transport import limits
from swarm_plugins.transport.counts import StreamCounts
from swarm_plugins.transport.messages import ForwardResponse, Message
from swarm_plugins.transport.receiving.allowances import Allowances
from swarm_plugins.transport.receiving.turnstile import Turnstile
from swarm_plugins.transport.stream import FrameStream
from swarm_plugins.transport.wire import decode_body, encode

both_loops = pytest.mark.parametrize(
    "anyio_backend", ["asyncio", ("asyncio", {"use_uvloop": True})], ids=["asyncio", "uvloop"]
)


def limited(**values: float) -> Any:
    """Changes limits while the ``with`` block runs."""
    return mock.patch.multiple(limits, **values)


@contextlib.asynccontextmanager
async def stream_and_socket(
    budget: Ledger | None = None,
    counts: StreamCounts | None = None,
    *,
    peer: str = "peer-x",
    is_served: bool = False,
    allowances: Allowances | None = None,
) -> AsyncIterator[tuple[FrameStream, socket.socket]]:
    """A stream, and the bare socket at its other end."""
    near, far = socket.socketpair()
    far.setblocking(False)
    _, writer = await asyncio.open_unix_connection(sock=near)
    ledger = budget or Ledger(limits.MAX_RECEIVING_BYTES)
    turnstile = Turnstile(ledger.group) if is_served else None
    stream = FrameStream(peer, ledger, counts, turnstile=turnstile, allowances=allowances)
    stream.attach(writer, b"")
    try:
        yield stream, far
    finally:
        await stream.close()
        far.close()
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def two_streams() -> AsyncIterator[tuple[FrameStream, FrameStream]]:
    near, far = socket.socketpair()
    ends = []
    for end in (near, far):
        _, writer = await asyncio.open_unix_connection(sock=end)
        stream = FrameStream("peer-x", Ledger(limits.MAX_RECEIVING_BYTES))
        stream.attach(writer, b"")
        ends.append(stream)
    try:
        yield ends[0], ends[1]
    finally:
        for stream in ends:
            await stream.close()
        await asyncio.sleep(0.01)


def message(num_elements: int) -> ForwardResponse:
    return ForwardResponse(hidden=torch.arange(num_elements, dtype=torch.float32))


def frame_bytes(num_elements: int) -> bytes:
    return b"".join(encode(message(num_elements)))


async def read_hidden(stream: FrameStream, timeout_s: float = 20.0) -> torch.Tensor:
    frame = await stream.read(timeout_s)
    assert frame is not None
    received: Message = decode_body(frame.header, frame.body)
    assert isinstance(received, ForwardResponse)
    return received.hidden


async def claims(budget: Ledger, num_bytes: int) -> None:
    while budget.used < num_bytes:
        await asyncio.sleep(0.01)
