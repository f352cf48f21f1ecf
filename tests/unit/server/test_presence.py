"""A server stays announced, whatever one announcement meets."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from fake_server import VERSION

from swarm_plugins.errors import TransportError
from swarm_plugins.server.presence import Presence
from swarm_plugins.transport.node import SwarmNode
from swarm_plugins.transport.server_info import ServerInfo


class Node:
    """A node of which some announcements fail."""

    is_alive = True

    def __init__(self, errors: dict[int, Exception]) -> None:
        self.errors = errors
        self.num_announced = 0
        self.is_past_them = asyncio.Event()

    async def announce(self, info: ServerInfo, ttl_s: float) -> None:
        self.num_announced += 1
        if self.num_announced in self.errors:
            raise self.errors[self.num_announced]
        if self.num_announced > max(self.errors):
            self.is_past_them.set()

    async def retract(self) -> None:
        pass

    async def wait_dead(self) -> None:
        await asyncio.Event().wait()


async def test_it_is_announced_again_whatever_an_announcement_meets(caplog: pytest.LogCaptureFixture) -> None:
    info = ServerInfo(version=VERSION, model="tiny", num_blocks=8, start=2, end=6, dtype="float32", quantization="none")
    node = Node({2: TransportError("no node answers"), 3: ValueError("unreadable")})
    presence = Presence(cast(SwarmNode, node), every_s=0.01)
    await presence.announce(lambda: info)
    await asyncio.wait_for(node.is_past_them.wait(), 20)
    await presence.retract()
    said = [one for one in caplog.records if "cannot announce, trying again" in one.getMessage()]
    assert ["unreadable" in (one.exc_text or "") for one in said] == [False, True]
