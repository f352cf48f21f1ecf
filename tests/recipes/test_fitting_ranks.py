"""``swarm fit --local-swarm`` in several processes: the first one serves."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_plugins import SwarmStrategy
from swarm_plugins.errors import ConfigError
from swarm_plugins.local_swarm import LocalSwarm
from swarm_plugins.recipes import fitting


def test_the_others_take_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    second: Any = SimpleNamespace(is_global_zero=False)
    servers = LocalSwarm("base", num_servers=2)
    with (
        pytest.raises(ConfigError, match=r"--local-swarm belongs to one process.*--trainer\.devices N without"),
        fitting._first_serves(servers, second),
    ):
        pass
    monkeypatch.setenv(fitting._PEERS, "/ip4/1 /ip4/2")
    with fitting._first_serves(servers, second) as peers:
        assert peers == ["/ip4/1", "/ip4/2"]


def test_the_servers_have_the_models_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, dict[str, Any]]] = []

    class Servers(contextlib.nullcontext[Any]):
        def __init__(self, base: str, **options: Any) -> None:
            started.append((base, options))
            super().__init__(SimpleNamespace(initial_peers=["/ip4/127.0.0.1/tcp/1/p2p/12D3KooW"]))

    monkeypatch.setattr(fitting, "LocalSwarm", Servers)
    trainer = SimpleNamespace(is_global_zero=True, strategy=SwarmStrategy())
    model = SimpleNamespace(base="me/base", revision="v2")
    with fitting._place_of(SimpleNamespace(model=model, trainer=trainer), 2, None):
        assert started == [("me/base", {"num_servers": 2, "revision": "v2"})]
