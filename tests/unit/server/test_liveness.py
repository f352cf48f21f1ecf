"""Servers that are gone are left out before their records expire."""

from __future__ import annotations

import asyncio

import pytest

from swarm_plugins.server import liveness
from swarm_plugins.server.liveness import Liveness
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.server_info import ServerInfo


def info(start: int, end: int) -> ServerInfo:
    return ServerInfo(version="v", model="m", num_blocks=8, start=start, end=end, dtype="float32", quantization="none")


async def answers(channel: Channel) -> None:
    while await channel.receive(timeout_s=5.0) is not None:
        await channel.send(info(0, 4))


def test_a_server_that_is_gone_is_left_out_and_counts_again_when_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_PAUSE_S", 0.01)
    crowd = {f"crowd{index}": info(0, 4) for index in range(40)}
    infos = {"me": info(0, 4), "lone": info(4, 8), **crowd}
    transport = LocalTransport({peer: {"rpc_info": answers} for peer in infos})

    async def run() -> None:
        look = Liveness(transport, "me")
        assert await look.living(infos) == infos
        await transport.kill("lone")
        living = await look.living(infos)  # the only holder of blocks is asked first
        assert living.keys() == infos.keys() - {"lone"}
        transport.revive("lone")
        assert await look.living(infos) == infos
        await transport.close()

    asyncio.run(run())
