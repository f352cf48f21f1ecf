"""The state of a swarm: what it holds, how often it is surveyed, and what happens when that fails."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from client_kit import VERSION, server_info

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.client import SwarmConfig, SwarmConnection
from swarm_plugins.errors import TransportError
from swarm_plugins.testing import InProcessSwarm
from swarm_plugins.testing.models import save_tiny
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.records import ModelInfo
from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.verification import Quarantine
from swarm_plugins.versions import ModelVersion
from swarm_plugins.web.swarm_state import State, SwarmSource


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Network(LocalTransport):
    """A swarm whose servers do not answer; counts how often it is asked."""

    def __init__(self, models: dict[str, ModelInfo], infos: dict[str, ServerInfo] | None = None) -> None:
        super().__init__({})
        self.found = models
        self.infos = infos or {}
        self.num_asked = 0
        self.fault: Exception | None = None

    async def models(self) -> dict[str, ModelInfo]:
        self.num_asked += 1
        await asyncio.sleep(0.05)
        if self.fault is not None:
            raise self.fault
        return self.found

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        return {peer: info for peer, info in self.infos.items() if info.version == version}


@pytest.fixture
def network() -> Network:
    return Network({VERSION.key: ModelInfo("org/tiny", 4, 1)}, {"QmGone": server_info(0, 4, 4)})


@pytest.fixture
def connection(network: Network) -> Iterator[SwarmConnection]:
    async def opened() -> Network:
        return network

    with SwarmConnection(opened, SwarmConfig(), initial_peers=("/ip4/127.0.0.1/tcp/1/p2p/QmGone",)) as connection:
        yield connection


def look(source: SwarmSource) -> dict[str, Any]:
    return read(asyncio.run(source.state()))


def read(state: State) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(state.body)
    return found


def test_the_state_names_servers_gaps_bans_and_the_way_in(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "tiny")
    quarantine = Quarantine(tmp_path / "quarantine")
    clock = Clock()
    with InProcessSwarm(model, spans=[(0, 2), (2, 4), (2, 4)]) as swarm:
        version = ModelVersion("tiny", swarm.services["peer0"].version)
        blocks = swarm.connection.blocks(version=version, num_blocks=4, model=str(model))
        blocks.check()
        source = SwarmSource(swarm.connection, views=[blocks.view], quarantine=quarantine, clock=clock)
        [one] = look(source)["models"]
        assert one["coverage"] == [1, 1, 2, 2]
        assert one["gaps"] == []
        assert one["join"] == f"swarm serve {model} --initial-peers ADDRESS"
        first = one["servers"][0]
        assert (first["peer"], first["start"], first["end"], first["ban"]) == ("peer0", 0, 2, None)
        assert 0 < first["round_trip_s"] < 5

        quarantine.add("peer2", model=version.key, reason="wrong forward of blocks 2:4")
        blocks.view.ban("peer1", TransportError("the stream broke"))
        swarm.kill("peer0")
        clock.now = 2.0
        [one] = look(source)["models"]
        assert one["missing_blocks"] == [0, 1]
        command = f"swarm serve {model} --blocks 0:2 --initial-peers ADDRESS"
        assert one["gaps"] == [{"blocks": [0, 2], "experts": None, "command": command}]
        servers = {server["peer"]: server for server in one["servers"]}
        assert servers["peer1"]["ban"]["reason"] == "the stream broke"
        assert 0 < servers["peer1"]["ban"]["left_s"] <= 2.0
        assert servers["peer2"]["quarantine"] == "wrong forward of blocks 2:4"


def test_a_server_that_does_not_answer_leaves_a_gap_with_a_command(connection: SwarmConnection) -> None:
    [one] = look(SwarmSource(connection))["models"]
    [server] = one["servers"]
    assert not server["is_reachable"]
    assert server["reason"]
    address = "/ip4/127.0.0.1/tcp/1/p2p/QmGone"
    assert one["gaps"][0]["command"] == (
        f"swarm serve org/tiny --revision {'a' * 40} --blocks 0:4 --initial-peers {address}"
    )


def test_a_directory_is_named_by_its_path_if_a_copy_lies_here(
    connection: SwarmConnection, network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny("llama", tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    here = Checkpoint.open(model).version.revision
    network.found = {here: ModelInfo("tiny", 4, 1), "local-" + "0" * 40: ModelInfo("other", 4, 1)}
    joins = {one["model"]: one["join"].split()[2] for one in look(SwarmSource(connection))["models"]}
    assert joins == {"tiny": str(model), "other": "PATH/TO/other"}


def test_a_client_whose_servers_are_all_gone_still_sees_the_gap(connection: SwarmConnection, network: Network) -> None:
    network.found = {}
    view = connection.blocks(version=VERSION, num_blocks=4).view
    [one] = look(SwarmSource(connection, views=[view]))["models"]
    assert (one["missing_blocks"], one["servers"]) == ([0, 1, 2, 3], [])


def test_any_number_of_askers_share_one_survey_every_two_seconds(connection: SwarmConnection, network: Network) -> None:
    clock = Clock()
    source = SwarmSource(connection, clock=clock)

    async def ask() -> None:
        states = await asyncio.gather(*(source.state() for _ in range(20)))
        assert len({state.body for state in states}) == 1

    asyncio.run(ask())
    assert network.num_asked == 1
    clock.now = 1.9
    asyncio.run(ask())
    assert network.num_asked == 1
    clock.now = 2.0
    asyncio.run(ask())
    assert network.num_asked == 2


def test_an_asker_that_leaves_does_not_end_the_survey_of_the_others(
    connection: SwarmConnection, network: Network
) -> None:
    source = SwarmSource(connection)

    async def ask() -> State:
        first, second = (asyncio.create_task(source.state()) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        return await second

    assert read(asyncio.run(ask()))["error"] == ""
    assert network.num_asked == 1


def test_a_survey_that_fails_keeps_what_was_known(connection: SwarmConnection, network: Network) -> None:
    clock = Clock()
    source = SwarmSource(connection, clock=clock)
    network.fault = TransportError("none of the initial peers can be reached")
    state = asyncio.run(source.state())
    assert not state.is_known
    assert read(state) | {"software": ""} == {
        "software": "",
        "surveyed_at": None,
        "error": "none of the initial peers can be reached",
        "initial_peers": ["/ip4/127.0.0.1/tcp/1/p2p/QmGone"],
        "models": [],
    }
    network.fault = None
    clock.now = 2.0
    assert look(source)["surveyed_at"] == pytest.approx(time.time(), abs=60)
    network.fault = TransportError("gone")
    clock.now = 4.0
    state = asyncio.run(source.state())
    assert state.is_known
    assert (read(state)["error"], len(read(state)["models"])) == ("gone", 1)


def test_servers_that_never_answer_leave_the_others_their_turn(
    connection: SwarmConnection, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_plugins.web.swarm_state._SERVERS_S", 0.3)
    asked = []

    async def open_never(peer: str, rpc: str, *, timeout_s: float) -> Any:
        asked.append(peer)
        if peer == "QmHonest":
            raise TransportError("it has answered")
        await asyncio.Event().wait()

    monkeypatch.setattr(network, "open", open_never)
    network.found = {VERSION.key: ModelInfo("org/tiny", 4, 40), "z" * 40: ModelInfo("org/honest", 4, 1)}
    network.infos = {f"Qm{index}": server_info(0, 4, 4) for index in range(40)}
    network.infos["QmHonest"] = msgspec.structs.replace(server_info(0, 4, 4), version="z" * 40)
    found = look(SwarmSource(connection))
    assert found["error"] == ""
    reasons = {server["peer"]: server["reason"] for one in found["models"] for server in one["servers"]}
    assert len(reasons) == 41
    assert reasons["QmHonest"] == "it has answered"
    late = [peer for peer, reason in reasons.items() if reason.startswith("not asked in time")]
    assert sorted(late) == sorted(reasons.keys() - set(asked))
    assert late


def test_a_closed_connection_is_a_reason_not_a_crash(connection: SwarmConnection) -> None:
    source = SwarmSource(connection)
    connection.close()
    assert "closed" in look(source)["error"]


def test_a_flood_of_servers_and_versions_is_cut(connection: SwarmConnection, network: Network) -> None:
    network.found = {f"{index:040x}": ModelInfo("org/flood", 4, 1) for index in range(100)}
    network.found[VERSION.key] = ModelInfo("org/tiny", 300, 400)
    network.found["b" * 40] = ModelInfo("org/endless", 100_000, 500)
    network.infos = {
        f"Qm{index}": server_info(index % 300, index % 300 + 1, 300, adapters=tuple(map(str, range(1000))))
        for index in range(400)
    }
    found = look(SwarmSource(connection))
    assert len(found["models"]) <= 32
    assert "org/endless" not in [one["model"] for one in found["models"]]
    tiny = next(one for one in found["models"] if one["version"] == VERSION.key)
    assert len(tiny["servers"]) == 256
    assert len(tiny["servers"][0]["adapters"]) == 64
