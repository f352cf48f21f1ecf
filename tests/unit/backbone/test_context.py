"""Peers come from the argument, else the active strategy, else the environment."""

from __future__ import annotations

import pytest

from swarm_plugins.backbone.context import SwarmSettings, active_swarm, resolve_settings
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.errors import ConfigError

ONE = "/ip4/127.0.0.1/tcp/1/p2p/QmOne"
TWO = "/ip4/127.0.0.1/tcp/2/p2p/QmTwo"
ACTIVE = SwarmSettings(initial_peers=(TWO,), config=SwarmConfig(max_retries=7))


@pytest.fixture(autouse=True)
def _no_peers_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_INITIAL_PEERS", raising=False)


@pytest.mark.parametrize(
    "peers",
    [
        pytest.param([ONE, TWO], id="list"),
        pytest.param((ONE, TWO), id="tuple"),
        pytest.param(f"{ONE},{TWO}", id="commas"),
        pytest.param(f" {ONE}  {TWO}\n", id="spaces"),
    ],
)
def test_an_argument_is_read(peers: list[str] | str) -> None:
    assert resolve_settings(peers, None).initial_peers == (ONE, TWO)


def test_the_argument_wins_over_the_strategy_and_the_strategy_over_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SWARM_INITIAL_PEERS", ONE)
    assert resolve_settings(None, None).initial_peers == (ONE,)
    with active_swarm(ACTIVE):
        assert resolve_settings(None, None) == ACTIVE
        assert resolve_settings([ONE], None).initial_peers == (ONE,)
    assert resolve_settings(None, None).initial_peers == (ONE,)


def test_a_config_of_one_s_own_is_used_with_the_strategy_s_peers() -> None:
    config = SwarmConfig(max_retries=1)
    with active_swarm(ACTIVE):
        settings = resolve_settings(None, config)
    assert settings == SwarmSettings(initial_peers=(TWO,), config=config)


def test_the_strategy_s_swarm_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), active_swarm(ACTIVE):
        raise KeyError
    with pytest.raises(ConfigError):
        resolve_settings(None, None)


@pytest.mark.parametrize("peers", [None, [], "", " , "], ids=["none", "empty-list", "empty", "blank"])
def test_no_peers_names_the_three_ways(peers: list[str] | str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_settings(peers, None)
    message = str(caught.value)
    assert "initial_peers=[...]" in message
    assert 'Trainer(strategy="swarm")' in message
    assert "SWARM_INITIAL_PEERS" in message
    assert "/ip4/203.0.113.7/tcp/31337/p2p/Qm..." in message


@pytest.mark.parametrize("peer", ["localhost:31337", "/ip4/127.0.0.1/tcp/1", "QmOne"])
def test_what_is_no_address_is_named(peer: str) -> None:
    with pytest.raises(ConfigError, match=f"'{peer}' is not a peer address; expected one like /ip4/"):
        resolve_settings([peer], None)
