"""Each lie is caught at its first call, and the run ends with the losses of a run without liars."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from lies_kit import CHECKED, HONEST, train, with_liar

from kits.liars import LIES, Liar, Lie
from swarm_plugins.client import SwarmConfig
from swarm_plugins.errors import ConfigError
from swarm_plugins.testing import InProcessSwarm
from swarm_plugins.verification import Quarantine


@functools.cache
def clean_losses(directory: Path) -> list[float]:
    with InProcessSwarm(directory, spans=[(0, 2), (2, 4)], config=HONEST) as swarm:
        return train(swarm)


def listed(cache: Path) -> dict[str, str]:
    return Quarantine(cache / "quarantine").reasons()


@pytest.mark.parametrize(
    ("lie", "factor"), [*((lie, 1.01) for lie in LIES), ("scaled", 1.05)], ids=[*LIES, "scaled by 1.05"]
)
def test_a_lie_is_caught_at_once_and_leaves_no_trace(llama: Path, cache: Path, lie: Lie, factor: float) -> None:
    liar = Liar(lie, factor=factor)
    with with_liar(llama, liar) as swarm:
        assert train(swarm) == clean_losses(llama)
        # An adapter is stale from the second step on.
        assert liar.calls == (2 if lie == "stale_adapter" else 1)
        assert list(listed(cache)) == [swarm.peers[1]]


def test_a_mixture_is_checked_too(mixtral: Path, cache: Path) -> None:
    with with_liar(mixtral, Liar("scaled")) as swarm:
        assert train(swarm, steps=1) == clean_losses(mixtral)[:1]
        assert "wrong forward of blocks 2:4" in listed(cache)[swarm.peers[1]]


def test_without_checks_a_lie_is_believed(llama: Path, cache: Path) -> None:
    for config in (HONEST, SwarmConfig(allowed_peers=("peer0", "peer1"))):
        with with_liar(llama, Liar("echo"), config=config) as swarm:
            assert train(swarm, steps=1) != clean_losses(llama)[:1]
    assert not listed(cache)


def test_a_caught_server_stays_excluded_for_later_clients(llama: Path, cache: Path) -> None:
    liar = Liar("echo")
    with with_liar(llama, liar, config=CHECKED) as swarm:
        Quarantine(cache / "quarantine").add(swarm.peers[1], model="tiny", reason="a lie")
        assert train(swarm, steps=1) == clean_losses(llama)[:1]
    assert liar.calls == 0


@pytest.mark.parametrize(
    ("addresses", "settings", "is_verified"),
    [
        (["/ip4/203.0.113.7/tcp/1/p2p/Qm"], {}, True),
        (["/ip4/127.0.0.1/tcp/1/p2p/Qm", "/ip4/203.0.113.7/tcp/1/p2p/Qm"], {}, True),
        (["/ip4/127.0.0.1/tcp/1/p2p/Qm"], {}, False),
        (["/ip4/127.0.0.1/tcp/1/p2p/Qm"], {"verify": "on"}, True),
        (["/ip4/203.0.113.7/tcp/1/p2p/Qm"], {"verify": "off"}, False),
        (["/ip4/203.0.113.7/tcp/1/p2p/Qm"], {"allowed_peers": ("Qm",)}, False),
        (["/ip4/203.0.113.7/tcp/1/p2p/Qm"], {"allowed_peers": ("Qm",), "verify": "on"}, True),
    ],
)
def test_strangers_are_checked(addresses: list[str], settings: dict[str, Any], is_verified: bool) -> None:
    config = SwarmConfig(**settings)
    assert config.wants_checks(addresses) == is_verified


def test_unknown_verify_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown verify 'yes'; known: auto, on, off"):
        SwarmConfig(verify="yes")  # type: ignore[arg-type]
