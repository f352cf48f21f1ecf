"""Hostile peers of the DHT at a real ``swarm serve``: decoding goes on meanwhile."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from swarm_plugins import AutoSwarmModelForCausalLM, LocalSwarm, SwarmConfig
from swarm_plugins.client import connect
from swarm_plugins.testing.models import save_tiny
from swarm_plugins.transport.messages import InfoRequest, ServerInfo
from swarm_plugins.transport.node import NodeConfig, SwarmNode

pytestmark = pytest.mark.swarm

ATTACKER = Path(__file__).with_name("dht_attacker.py")
def P(*a): open("/tmp/figs","a").write(repr(a)+"\n")
ATTACK_S = 4.0
MIB = 1 << 20


class Seen(NamedTuple):
    """What an honest client saw for some seconds."""

    longest_answer_s: float
    """Of the server's event loop, to a message that takes no computing."""
    rounds: int
    longest_round_s: float


@contextmanager
def attack(address: str, kind: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, str(ATTACKER), address, kind], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        psutil.wait_procs(children, 10)


async def watch(swarm: LocalSwarm, honest: PreTrainedModel, expected: Tensor) -> Seen:
    ended = asyncio.Event()

    async def longest_answer() -> float:
        longest = 0.0
        async with SwarmNode(
            NodeConfig(initial_peers=tuple(swarm.initial_peers), client_mode=True, discovery="static")
        ) as node:
            channel = await node.open(swarm.servers[0].peer_id, "rpc_info", timeout_s=20.0)
            while not ended.is_set():
                started = time.perf_counter()
                await channel.send(InfoRequest())
                assert isinstance(await channel.receive(timeout_s=20.0), ServerInfo)
                longest = max(longest, time.perf_counter() - started)
                await asyncio.sleep(0.02)
        return longest

    watching = asyncio.create_task(longest_answer())
    rounds = []
    until = time.monotonic() + ATTACK_S
    while time.monotonic() < until:
        started = time.monotonic()
        found = await asyncio.to_thread(generate, honest)
        rounds.append(time.monotonic() - started)
        assert torch.equal(found, expected)
    ended.set()
    return Seen(await watching, len(rounds), max(rounds))


def generate(honest: PreTrainedModel) -> Tensor:
    return honest.generate(torch.tensor([[5, 6, 7, 8, 9, 10]]), max_new_tokens=6, do_sample=False)


def test_calls_of_the_dht_without_end_hold_up_no_decoding(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "tiny-llama")
    with LocalSwarm(model, num_servers=1) as swarm, connect(swarm.initial_peers, SwarmConfig()) as connection:
        honest = AutoSwarmModelForCausalLM.from_pretrained(model, connection=connection)
        expected = generate(honest)
        memory = psutil.Process(swarm.servers[0].pid).memory_info
        before = memory().rss
        P("calm", asyncio.run(watch(swarm, honest, expected)))
        for kind in ("look-ups", "records", "pings"):
            with attack(swarm.initial_peers[0], kind):
                seen = asyncio.run(watch(swarm, honest, expected))
                P(kind, seen, (memory().rss - before) / MIB)
            # Without the bounds one call of look-ups or records stops the loop for 3 to 24 s.
            assert seen.longest_answer_s < 2.0
            assert seen.longest_round_s < 4.0
        assert memory().rss - before < 100 * MIB
