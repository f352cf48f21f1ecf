"""``swarm fit --local-swarm`` in several processes: the first one serves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swarm_plugins.errors import ConfigError
from swarm_plugins.recipes import fitting


def test_the_others_take_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    second: Any = SimpleNamespace(is_global_zero=False)
    with (
        pytest.raises(ConfigError, match=r"--local-swarm belongs to one process.*--trainer\.devices N without"),
        fitting._first_serves("base", 2, second),
    ):
        pass
    monkeypatch.setenv(fitting._PEERS, "/ip4/1 /ip4/2")
    with fitting._first_serves("base", 2, second) as peers:
        assert peers == ["/ip4/1", "/ip4/2"]
