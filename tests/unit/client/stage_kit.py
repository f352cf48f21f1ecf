"""Servers that take their time for each chunk of a batch, in the time of the loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import torch
import virtual_time
from client_kit import VERSION, server_info
from torch import Tensor

from swarm_plugins.block_io import SpanInputs, SpanOutputs
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.discovery.view import SwarmView
from swarm_plugins.client.peers import Peers
from swarm_plugins.client.servers import Servers
from swarm_plugins.client.training.batch import BatchCall
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import (
    AdapterStored,
    AdapterUpload,
    BackwardRequest,
    BackwardResponse,
    Failure,
    FailureKind,
    ForwardRequest,
    ForwardResponse,
    Message,
)
from swarm_plugins.transport.server_info import ServerInfo

STEP_S = 1.0
Fails = Callable[[Message], FailureKind | None]


class Stage:
    """A server that computes one request after another; its blocks multiply by two, and by its adapter's first value.

    Args:
        start: First block.
        end: One past the last.
    """

    def __init__(self, start: int, end: int, **figures: Any) -> None:
        self.blocks = range(start, end)
        self.figures = {"throughput": 2.0 / STEP_S, **figures}
        self.fails: Fails = lambda _: None
        self.is_dead = False
        self.dies_at: int | None = None
        """The number of a request after which it is dead."""
        self.seen: list[Message] = []
        self.tokens_now = 0
        self.most_tokens = 0
        self.tickets: dict[str, float] = {}
        self.adapters: dict[str, float] = {}
        self.row_s = 0.0
        """What a row takes, instead of a second for any number."""
        self.most_kept = 1000
        """Rows of the largest graph that it keeps."""
        self._lock = asyncio.Lock()
        self._numbers = itertools.count()

    def info(self, num_blocks: int) -> ServerInfo:
        return server_info(self.blocks.start, self.blocks.stop, num_blocks, **self.figures)

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.seen)

    async def handle(self, channel: Channel) -> None:
        while (message := await channel.receive(timeout_s=1000.0)) is not None:
            self.seen.append(message)
            tokens = message.hidden.shape[:2].numel() if isinstance(message, ForwardRequest) else 0
            self.tokens_now += tokens
            self.most_tokens = max(self.most_tokens, self.tokens_now)
            kind = self.fails(message)
            try:
                if kind is None:
                    async with self._lock:
                        await asyncio.sleep(self.row_s * rows_of(message) or STEP_S)
                    self.is_dead |= self.dies_at is not None and len(self.seen) > self.dies_at
            finally:
                self.tokens_now -= tokens
            if self.is_dead:
                return
            await channel.send(self._answer(message) if kind is None else Failure(kind=kind, message="no"))

    def _answer(self, message: Message) -> Message:
        if isinstance(message, AdapterUpload):
            self.adapters[message.digest] = message.tensors[0].flatten()[0].item()
            return AdapterStored(digest=message.digest)
        if isinstance(message, ForwardRequest):
            if not set(message.adapters) <= set(self.adapters):
                return Failure(kind="unknown_adapter", message="upload it")
            is_kept = message.keep and rows_of(message) <= self.most_kept
            ticket = f"{next(self._numbers)}" if is_kept else None
            self.tickets[ticket or ""] = self._factor(message)
            return ForwardResponse(hidden=message.hidden * self._factor(message), ticket=ticket)
        assert isinstance(message, BackwardRequest)
        if message.ticket is None:
            assert message.forward is not None
            factor: float | None = self._factor(message.forward)
        else:
            factor = self.tickets.pop(message.ticket, None)
        if factor is None:
            return Failure(kind="unknown_ticket", message="gone")
        grads = (message.grad_hidden.sum().reshape(1, 1),) if message.needs_adapters else ()
        return BackwardResponse(grad_hidden=message.grad_hidden * factor, grad_adapters=grads)

    def _factor(self, message: ForwardRequest) -> float:
        factor = 2.0 ** (message.end - message.start)
        for digest in message.adapters:
            factor *= self.adapters[digest]
        return factor


def rows_of(message: Message) -> int:
    if isinstance(message, ForwardRequest):
        return message.hidden.shape[0]
    return message.grad_hidden.shape[0] if isinstance(message, BackwardRequest) else 0


Use = Callable[[Servers, LocalTransport], Awaitable[float]]


def run(stages: dict[str, Stage], use: Use, *, num_blocks: int = 3, **config: Any) -> float:
    """Returns what a coroutine returns that uses servers."""

    async def main() -> float:
        handlers = {}
        for peer, stage in stages.items():

            async def tell(channel: Channel, stage: Stage = stage) -> None:
                while await channel.receive(timeout_s=1000.0) is not None and not stage.is_dead:
                    await channel.send(stage.info(num_blocks))

            rpcs = ("rpc_forward", "rpc_backward", "rpc_adapter")
            handlers[peer] = {"rpc_info": tell, **dict.fromkeys(rpcs, stage.handle)}
        transport = LocalTransport(handlers)
        settings = SwarmConfig(**config)
        peers = Peers(transport, settings)
        view = SwarmView(transport, peers, settings, version=VERSION, num_blocks=num_blocks)
        try:
            return await use(Servers(peers, view), transport)
        finally:
            await peers.close()
            await transport.close()

    return virtual_time.run(main(), timeout_s=1000)


def three() -> dict[str, Stage]:
    return {peer: Stage(index, index + 1) for index, peer in enumerate("abc")}


def batch(rows: int = 8, length: int = 2) -> SpanInputs:
    return SpanInputs(blocks=range(3), hidden=torch.arange(float(rows * length * 4)).reshape(rows, length, 4))


async def backward(call: BatchCall) -> Tensor:
    grads = SpanOutputs(hidden=call.inputs.hidden.clone())
    hidden = (await call.backward(grads, needs_hidden=True, needs=()))[0]
    assert hidden is not None
    return hidden
