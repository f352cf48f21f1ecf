"""Places come from the argument, else the active strategy, else the environment."""

from __future__ import annotations

import pytest

from swarm_plugins.backbone.context import OnThisMachine, SwarmSettings, active_place, find_place, resolve_place
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.errors import ConfigError
from swarm_plugins.offload import OffloadConfig

ONE = "/ip4/127.0.0.1/tcp/1/p2p/QmOne"
TWO = "/ip4/127.0.0.1/tcp/2/p2p/QmTwo"
ACTIVE = SwarmSettings(initial_peers=(TWO,), config=SwarmConfig(max_retries=7))


def peers_of(peers: list[str] | tuple[str, ...] | str | None) -> tuple[str, ...]:
    place = resolve_place(peers, None)
    assert isinstance(place, SwarmSettings)
    return place.initial_peers


@pytest.fixture(autouse=True)
def _no_peers_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_INITIAL_PEERS", raising=False)
    monkeypatch.delenv("SWARM_OFFLOAD", raising=False)


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
    assert peers_of(peers) == (ONE, TWO)


def test_the_argument_wins_over_the_strategy_and_the_strategy_over_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SWARM_INITIAL_PEERS", ONE)
    assert peers_of(None) == (ONE,)
    with active_place(ACTIVE):
        assert resolve_place(None, None) == ACTIVE
        assert peers_of([ONE]) == (ONE,)
    assert peers_of(None) == (ONE,)


def test_a_config_of_one_s_own_is_used_with_the_strategy_s_peers() -> None:
    config = SwarmConfig(max_retries=1)
    with active_place(ACTIVE):
        settings = resolve_place(None, config)
    assert settings == SwarmSettings(initial_peers=(TWO,), config=config)


def test_the_strategy_s_swarm_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), active_place(ACTIVE):
        raise KeyError
    with pytest.raises(ConfigError):
        resolve_place(None, None)


@pytest.mark.parametrize("peers", [None, [], "", " , "], ids=["none", "empty-list", "empty", "blank"])
def test_no_peers_names_the_three_ways(peers: list[str] | str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_place(peers, None)
    message = str(caught.value)
    assert "initial_peers=[...]" in message
    assert 'Trainer(strategy="swarm")' in message
    assert "SWARM_INITIAL_PEERS" in message
    assert "/ip4/203.0.113.7/tcp/31337/p2p/Qm..." in message


@pytest.mark.parametrize("peer", ["localhost:31337", "/ip4/127.0.0.1/tcp/1", "QmOne"])
def test_what_is_no_address_is_named(peer: str) -> None:
    with pytest.raises(ConfigError, match=f"'{peer}' is not a peer address; expected one like /ip4/"):
        resolve_place([peer], None)


def test_this_machine_is_named_by_a_config_its_text_the_strategy_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = OffloadConfig(fast_bytes=8 * 10**9)
    place = OnThisMachine(offload=config)
    assert find_place(None, None, config) == find_place(None, None, "fast=8GB") == place
    assert find_place(None, None, "none") == OnThisMachine(offload=None)
    with active_place(place):
        assert find_place(None, SwarmConfig()) == place
    monkeypatch.setenv("SWARM_OFFLOAD", "fast=8GB")
    assert find_place(None, None) == place
    assert peers_of([ONE]) == (ONE,)


def test_the_argument_for_this_machine_wins_over_a_swarm_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_INITIAL_PEERS", ONE)
    assert find_place(None, None, "none") == OnThisMachine(offload=None)
    monkeypatch.setenv("SWARM_OFFLOAD", "none")
    with pytest.raises(ConfigError, match="blocks run in one place: unset one of them"):
        find_place(None, None)


def test_two_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocks run in one place: leave one of them out"):
        find_place([ONE], None, "none")
    with (
        active_place(OnThisMachine(offload=None)),
        pytest.raises(ConfigError, match="blocks run in one place: leave one of them out"),
    ):
        find_place([ONE], None)


@pytest.mark.parametrize("offload", ["fast=much", "memory", 8_000])
def test_malformed_offloading_names_where_it_stands(offload: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^(invalid )?offload "):
        find_place(None, None, offload)  # type: ignore[arg-type]
    monkeypatch.setenv("SWARM_OFFLOAD", "fast=much")
    with pytest.raises(ConfigError, match="invalid SWARM_OFFLOAD fast=much: "):
        find_place(None, None)
