"""Servers measure how far they are from their neighbors, and clients go by it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import virtual_time

from recipes.benchmarks.links import Link
from recipes.benchmarks.links.transport import LineTransport
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.discovery.view import SwarmView
from swarm_plugins.client.peers import Peers
from swarm_plugins.routing import Demand
from swarm_plugins.server.distances import keep_measured, neighbors, round_trips
from swarm_plugins.transport.channel import Channel, Handler
from swarm_plugins.transport.records import MAX_ROUND_TRIPS
from swarm_plugins.transport.server_info import EchoRequest, EchoResponse, ServerInfo
from swarm_plugins.versions import ModelVersion

VERSION = ModelVersion("tiny", "a" * 40)


def info_of(start: int, end: int, **changes: Any) -> ServerInfo:
    return ServerInfo(
        version=VERSION.key,
        model=VERSION.name,
        num_blocks=8,
        start=start,
        end=end,
        dtype="float32",
        quantization="none",
        throughput=1e9,
        free_kv_tokens=1000,
        pushes=True,
        **changes,
    )


class Swarm:
    """Servers that answer infos and echoes, at distances from each other and from a client."""

    def __init__(self, infos: dict[str, ServerInfo], silent: Iterable[str] = ()) -> None:
        self.infos = infos
        self.transport = LineTransport({peer: {"rpc_info": self._handler(peer)} for peer in infos})
        for peer in silent:
            self.transport.line(peer, "a").loses_answers = True

    def _handler(self, peer: str) -> Handler:
        async def handle(channel: Channel) -> None:
            while (message := await channel.receive(timeout_s=100.0)) is not None:
                is_echo = isinstance(message, EchoRequest)
                await channel.send(EchoResponse(payload=message.payload) if is_echo else self.infos[peer])  # type: ignore[union-attr]

        return handle

    def put(self, one: str, two: str, rtt_ms: float) -> None:
        for caller, called in ((one, two), (two, one)):
            self.transport.line(called, caller).link = Link(rtt_ms=rtt_ms)

    def at(self, peer: str) -> Place:
        return Place(self, peer)

    def describe(self, peer: str, **changes: Any) -> None:
        self.infos[peer] = msgspec.structs.replace(self.infos[peer], **changes)


class Place:
    """The network as a server has it."""

    def __init__(self, swarm: Swarm, peer: str) -> None:
        self.peer_id = peer
        self._swarm = swarm

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        return dict(self._swarm.infos)

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        return await self._swarm.transport.seen_from(self.peer_id).open(peer, rpc, timeout_s=timeout_s)


async def measure_all(swarm: Swarm) -> None:
    for peer in swarm.infos:
        swarm.describe(peer, round_trips=await round_trips(swarm.at(peer), swarm.infos[peer]))


async def planned(swarm: Swarm, demand: Demand = Demand(kv_tokens=1), **config: Any) -> list[str]:  # noqa: B008
    settings = SwarmConfig(**config)
    peers = Peers(swarm.transport, settings)
    view = SwarmView(swarm.transport, peers, settings, version=VERSION, num_blocks=8)
    chain = await view.chain(range(8), demand)
    await peers.close()
    return [span.peer for span in chain]


def test_a_client_plans_with_distances_that_both_ends_measured() -> None:
    async def main() -> None:
        swarm = Swarm({"a": info_of(0, 4), "near": info_of(4, 8), "far": info_of(4, 8)})
        for peer, rtt_ms in {"a": 100, "near": 110, "far": 100}.items():
            swarm.transport.line(peer).link = Link(rtt_ms=rtt_ms)
        swarm.put("a", "near", 20)
        swarm.put("a", "far", 80)
        assert await planned(swarm) == ["a", "far"]
        await measure_all(swarm)
        assert dict(swarm.infos["a"].round_trips) == pytest.approx({"near": 0.02, "far": 0.08}, abs=1e-3)
        assert dict(swarm.infos["near"].round_trips) == pytest.approx({"a": 0.02}, abs=1e-3), "none to a replica"
        assert await planned(swarm) == ["a", "near"]
        assert await planned(swarm, Demand(tokens=16)) == ["a", "near"], "in training, too"
        assert await planned(swarm, push="off") == ["a", "far"]
        # What only one of two says attracts nothing.
        swarm.describe("far", round_trips=(("a", 0.0),))
        assert await planned(swarm) == ["a", "near"]
        swarm.describe("a", round_trips=())
        assert await planned(swarm) == ["a", "far"]
        await swarm.transport.close()

    virtual_time.run(main(), timeout_s=100)


def test_neighbors_are_those_that_come_next_or_before_in_a_chain() -> None:
    infos = {
        "me": info_of(2, 5),
        "before": info_of(0, 2),
        "overlapping": info_of(0, 3),
        "next": info_of(5, 8),
        "longer": info_of(2, 8),
        "replica": info_of(2, 5),
        "within": info_of(3, 4),
        "too-early": info_of(0, 1),
        "too-late": info_of(6, 8),
        "joining": info_of(5, 8, state="joining"),
        "older": msgspec.structs.replace(info_of(5, 8), pushes=False),
    }
    assert sorted(neighbors("me", infos["me"], infos)) == ["before", "longer", "next", "overlapping", "within"]


def test_of_many_neighbors_both_ends_take_the_same_pairs() -> None:
    infos = {f"{side}{index}": info_of(*span) for side, span in (("l", (0, 4)), ("r", (4, 8))) for index in range(40)}
    chosen = {peer: neighbors(peer, info, infos) for peer, info in infos.items()}
    assert {len(peers) for peers in chosen.values()} == {MAX_ROUND_TRIPS}
    mutual = sum(peer in chosen[other] for peer in infos for other in chosen[peer])
    # Independent choices would agree on 40 % of the pairs.
    assert mutual > 0.55 * len(infos) * MAX_ROUND_TRIPS


def test_measuring_goes_on_whatever_happens_and_waits_for_nobody_long() -> None:
    async def main() -> None:
        swarm = Swarm({"a": info_of(0, 4), "b": info_of(4, 8), "c": info_of(4, 8), "d": info_of(4, 8)}, silent="bc")
        swarm.put("a", "d", 30)
        described: asyncio.Queue[Any] = asyncio.Queue()
        clock = asyncio.get_running_loop().time
        task = asyncio.create_task(
            keep_measured(
                swarm.at("a"),
                lambda: swarm.infos["a"],
                lambda *, round_trips: described.put_nowait(round_trips),
                every_s=100.0,
            )
        )
        started = clock()
        first = await described.get()
        assert [peer for peer, _ in first] == ["d"]
        assert clock() - started < 4.5, "two seconds for each of the two"
        swarm.transport.line("b", "a").loses_answers = False
        assert {peer for peer, _ in await described.get()} == {"b", "d"}
        assert 75 < clock() - started < 140
        task.cancel()
        await swarm.transport.close()

    virtual_time.run(main(), timeout_s=1000)
