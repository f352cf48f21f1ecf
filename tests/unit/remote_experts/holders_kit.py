"""Holders in this process: real experts, handlers and wire format, without libp2p."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.client import SwarmConfig, SwarmConnection
from swarm_plugins.offload import OffloadConfig
from swarm_plugins.offload.held import HOLDER_BITS, load_held_experts
from swarm_plugins.remote_experts.holders import HolderView
from swarm_plugins.remote_experts.module import RemoteExpertsModule
from swarm_plugins.server.compute.scheduler import Scheduler
from swarm_plugins.server.rpc.table import service_handlers
from swarm_plugins.server.service import ExpertsService
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.channel import Channel, Handler
from swarm_plugins.transport.messages import ExpertsRequest, Message
from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.weights.published.weights import Published
from swarm_plugins.weights.widths import Width

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])


@dataclass(frozen=True)
class Held:
    """What a holder has."""

    experts: range
    part: tuple[int, int] | None = None
    blocks: range | None = None
    offload: OffloadConfig | None = None
    bits: Width | None = None


@dataclass
class Holders:
    """Holders of a model, by peer id."""

    directory: Path
    handlers: dict[str, dict[str, Handler]]
    transport: LocalTransport
    connection: SwarmConnection
    asked: list[tuple[str, ExpertsRequest]] = field(default_factory=list)
    """Requests that have arrived."""

    def kill(self, peer: str) -> None:
        self.connection.loop.run(self.transport.kill(peer))

    def answer_instead(self, peer: str, answer: Callable[[ExpertsRequest], Message], *, delay_s: float = 0.0) -> None:
        """Makes a holder answer something else; it still says what it serves."""

        async def handle(channel: Channel) -> None:
            while (message := await channel.receive(timeout_s=10.0)) is not None:
                assert isinstance(message, ExpertsRequest)
                self.asked.append((peer, message))
                await asyncio.sleep(delay_s)
                await channel.send(answer(message))

        self.handlers[peer] = {**self.handlers[peer], "rpc_experts": handle}
        # Streams that are open still lead to the other handler.
        self.kill(peer)
        self.transport.revive(peer)


@contextmanager
def serving(
    directory: Path,
    held: Mapping[str, Held],
    *,
    config: SwarmConfig | None = None,
    max_batch_tokens: int = 16_384,
) -> Iterator[Holders]:
    """Serves experts of a model inside this process."""
    checkpoint = Checkpoint.open(directory)
    num_blocks = int(checkpoint.config.num_hidden_layers)
    services: dict[str, ExpertsService] = {}
    for peer, what in held.items():
        blocks = what.blocks or range(num_blocks)
        experts = load_held_experts(
            checkpoint,
            blocks,
            what.experts,
            part=what.part,
            device=torch.device("cpu"),
            bits=what.bits,
            offload=what.offload,
        )
        info = ServerInfo(
            version=checkpoint.version.key,
            model=checkpoint.version.name,
            num_blocks=num_blocks,
            start=blocks.start,
            end=blocks.stop,
            dtype="float32",
            quantization=_announced(checkpoint, what.bits),
            throughput=1e6,
            max_batch_tokens=max_batch_tokens,
            experts=(what.experts.start, what.experts.stop),
            slice=what.part,
        )
        scheduler = Scheduler(experts)
        scheduler.start()
        services[peer] = ExpertsService(
            announced=info,
            held=experts,
            scheduler=scheduler,
            max_batch_tokens=max_batch_tokens,
        )
    handlers = {peer: dict(service_handlers(service)) for peer, service in services.items()}
    transport = LocalTransport(handlers)

    async def network() -> LocalTransport:
        return transport

    connection = SwarmConnection(network, config or SwarmConfig(max_retries=3, request_timeout_s=10.0))
    holders = Holders(directory, handlers, transport, connection)
    for peer, own in handlers.items():
        own["rpc_experts"] = _noting(holders, peer, own["rpc_experts"])
    try:
        with connection:
            yield holders
    finally:
        for service in services.values():
            service.scheduler.close()
            service.held.close()  # type: ignore[attr-defined]


def _announced(checkpoint: Checkpoint, bits: Width | None) -> str:
    published = Published.of(checkpoint)
    if published is not None:
        return published.name
    return next((name for name, known in HOLDER_BITS.items() if known == bits), f"experts-int{bits}")


def _noting(holders: Holders, peer: str, handler: Handler) -> Handler:
    async def handle(channel: Channel) -> None:
        receive = channel.receive

        async def receive_and_note(*, timeout_s: float) -> Message | None:
            message = await receive(timeout_s=timeout_s)
            if isinstance(message, ExpertsRequest):
                holders.asked.append((peer, message))
            return message

        channel.receive = receive_and_note  # type: ignore[method-assign]
        await handler(channel)

    return handle


def view_of(model: PreTrainedModel) -> HolderView:
    """The view of the swarm that a model's remote experts share."""
    module = next(one for one in model.modules() if isinstance(one, RemoteExpertsModule))
    return module._remote.holders.view


def prefer(model: PreTrainedModel, connection: SwarmConnection, peer: str, *, by_s: float = 0.1) -> None:
    """Makes a holder the nearest of all; one that a busy machine holds up for longer than ``by_s`` is not preferred."""
    view = view_of(model)
    connection.loop.run(view.refresh(force=True))
    for one, entry in view.entries.items():
        view.entries[one] = replace(entry, round_trip_s=0.0 if one == peer else by_s)


def outcome(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Returns logits, and the gradient of the embeddings."""
    embeds = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    logits = model(inputs_embeds=embeds).logits
    logits.square().sum().backward()
    assert embeds.grad is not None
    return logits.detach(), embeds.grad
