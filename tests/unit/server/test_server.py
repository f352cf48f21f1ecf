"""What a server announces while it starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_server import VERSION

from swarm_plugins.server import server as server_module
from swarm_plugins.server.config import ServeConfig
from swarm_plugins.server.server import SwarmServer
from swarm_plugins.server.startup.capacity import Speed
from swarm_plugins.transport.channel import Handler
from swarm_plugins.transport.server_info import ServerInfo


class Watching:
    """Stands for what a starting server calls, and notes what is announced then."""

    def __init__(self, server: SwarmServer) -> None:
        self.server = server
        self.states: list[tuple[str, str]] = []

    def _note(self, what: str) -> None:
        self.states.append((what, self.server.info.state))

    async def compare(self, service: object) -> None:
        self._note("compares")

    async def keep_up(self, service: object) -> None:
        return

    async def serve(self, handlers: Mapping[str, Handler]) -> None:
        self._note("serves")

    async def announce(self, info: Callable[[], ServerInfo]) -> None:
        self._note("announces")

    async def retract(self) -> None:
        return

    async def close(self) -> None:
        return


async def test_it_is_online_once_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = SwarmServer(ServeConfig(model="m"))
    server._info = ServerInfo(
        version=VERSION, model="m", num_blocks=4, start=0, end=4, dtype="", quantization="none", state="joining"
    )
    server._presence = server._others = watching = Watching(server)
    monkeypatch.setattr(server_module, "measure_held", lambda held: Speed(1000.0, 0.001))
    cache = SimpleNamespace(unused_bytes=0)
    await server._serve_experts(SimpleNamespace(dtype=torch.float32, hidden_size=4, cache=cache))
    await server.close()
    assert watching.states == [("compares", "joining"), ("serves", "joining"), ("announces", "online")]
