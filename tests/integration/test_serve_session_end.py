"""A server whose clients vanish."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psutil
import pytest
import torch

from swarm_plugins.errors import SwarmError
from swarm_plugins.local_swarm import LocalSwarm
from swarm_plugins.testing.models import save_tiny, tiny_config
from swarm_plugins.transport.messages import SessionOpen, SessionOpened, SessionStep, SessionStepResponse
from swarm_plugins.transport.node import NodeConfig, SwarmNode
from swarm_plugins.transport.server_info import InfoRequest, ServerInfo


async def info_of(node: SwarmNode, peer: str) -> ServerInfo:
    channel = await node.open(peer, "rpc_info", timeout_s=10)
    await channel.send(InfoRequest())
    info = await channel.receive(timeout_s=10)
    await channel.close()
    assert isinstance(info, ServerInfo)
    return info


@pytest.mark.swarm
def test_memory_of_a_vanished_client_comes_back(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "tiny")
    width = tiny_config("llama").hidden_size

    async def scene(swarm: LocalSwarm) -> None:
        peer = swarm.servers[0].peer_id
        config = NodeConfig(initial_peers=tuple(swarm.initial_peers), host_maddrs=())
        async with SwarmNode(config) as watcher:
            before = await info_of(watcher, peer)
            async with SwarmNode(config) as client:
                channel = await client.open(peer, "rpc_session", timeout_s=10)
                await channel.send(
                    SessionOpen(version=before.version, start=before.start, end=before.end, batch_size=2)
                )
                assert isinstance(await channel.receive(timeout_s=10), SessionOpened)
                await channel.send(SessionStep(hidden=torch.zeros(2, 100, width), cached_tokens=0))
                assert isinstance(await channel.receive(timeout_s=10), SessionStepResponse)
                during = await info_of(watcher, peer)
                assert during.free_kv_tokens < before.free_kv_tokens
            deadline = time.monotonic() + 30
            while (await info_of(watcher, peer)).free_kv_tokens != before.free_kv_tokens:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

    with LocalSwarm(model, num_servers=1, kv_bytes="16MB") as swarm:
        asyncio.run(scene(swarm))


@pytest.mark.swarm
def test_server_whose_daemon_dies_joins_again(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "tiny")

    async def scene(swarm: LocalSwarm) -> None:
        first, second = swarm.servers
        config = NodeConfig(initial_peers=first.addresses, host_maddrs=())
        async with SwarmNode(config) as watcher:
            [(version, known)] = (await watcher.models()).items()
            [daemon] = psutil.Process(second.pid).children()
            daemon.kill()
            deadline = time.monotonic() + 60
            while True:
                # With the key and the port that it had, so that clients which know it find it again.
                try:
                    assert (await info_of(watcher, second.peer_id)).start == 2
                    break
                except SwarmError:
                    assert time.monotonic() < deadline, second.log
                    await asyncio.sleep(0.2)
            assert second.peer_id in await watcher.servers(version, known.num_blocks)
            assert second.is_alive

    with LocalSwarm(model, num_servers=2) as swarm:
        asyncio.run(scene(swarm))
