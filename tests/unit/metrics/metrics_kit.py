"""A swarm in this process that has done a bit of everything, as monitors see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from transformers import DynamicCache

from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.errors import RefusedError
from swarm_plugins.server.service import Service
from swarm_plugins.testing.in_process import InProcessSwarm
from swarm_plugins.transport.counts import StreamCounts
from swarm_plugins.transport.server_info import InfoRequest, ServerInfo

IDS = torch.tensor([[5, 17, 99, 23, 42], [7, 8, 9, 10, 11]])


class Server:
    """A server of the swarm, with what a `SwarmServer` shows of itself."""

    def __init__(self, swarm: InProcessSwarm, peer: str) -> None:
        self.service: Service | None = swarm.services[peer]
        self.streams: StreamCounts = swarm.transport.counts_of[peer]


class Samples:
    """The samples of some collectors."""

    def __init__(self, *collectors: Collector) -> None:
        self.registry = CollectorRegistry()
        for one in collectors:
            self.registry.register(one)

    def __call__(self, name: str, **labels: str) -> float:
        found = self.registry.get_sample_value(name, labels)
        assert found is not None, f"{name} {labels} is not exposed"
        return found


def load(swarm: InProcessSwarm, *, adapter: bool = False) -> Any:
    base = AutoSwarmModelForCausalLM.from_pretrained(swarm.directory, connection=swarm.connection)
    return get_peft_model(base, LoraConfig(target_modules=["q_proj"])) if adapter else base


def train(swarm: InProcessSwarm) -> None:
    """A forward and a backward pass of 2 x 5 tokens."""
    load(swarm, adapter=True)(input_ids=IDS, labels=IDS).loss.backward()


def generate(model: Any) -> DynamicCache:
    """A prompt of 2 x 5 tokens and three steps of one token a row; the session stays open as long as its cache."""
    cache, ids = DynamicCache(config=model.config), IDS
    with torch.no_grad():
        for _ in range(4):
            ids = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    return cache


def fail_over(swarm: InProcessSwarm) -> None:
    """Kills the server of a session, which goes on at a replica."""
    model = load(swarm)
    cache = generate(model)
    swarm.kill(next(peer for peer, service in swarm.services.items() if len(service.sessions)))
    with torch.no_grad():
        model(input_ids=IDS[:, :1], past_key_values=cache, use_cache=True)


def send_nonsense(swarm: InProcessSwarm, peer: str) -> None:
    """Sends a request that is refused."""
    peers = swarm.connection.peers
    assert peers is not None
    with pytest.raises(RefusedError, match="rpc_forward got a InfoRequest"):
        swarm.connection.loop.run(peers.request(peer, "rpc_forward", InfoRequest(), ServerInfo))


@contextmanager
def busy_swarm(model: Path) -> Iterator[InProcessSwarm]:
    """Two replicas, one of which is killed after some work."""
    with InProcessSwarm(model, spans=[(0, 4), (0, 4)]) as swarm:
        train(swarm)
        send_nonsense(swarm, swarm.peers[0])
        fail_over(swarm)
        yield swarm
