"""What lying servers say when asked what they serve, and servers that say nothing at all."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import msgspec
import pytest

from swarm_plugins.book.record import Failed
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.discovery.view import SwarmView
from swarm_plugins.client.peers import Peers
from swarm_plugins.errors import TransportError
from swarm_plugins.routing import Demand
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import Message
from swarm_plugins.transport.server_info import ServerInfo
from swarm_plugins.versions import ModelVersion

VERSION = ModelVersion("tiny", "a" * 40)
INFO = ServerInfo(
    version=VERSION.key,
    model="tiny",
    num_blocks=4,
    start=0,
    end=4,
    dtype="float32",
    quantization="none",
    throughput=1e3,
)


NUM_OPEN = [0]
"""Streams that are open."""


class InfoChannel:
    def __init__(self, remote_peer: str, info: ServerInfo) -> None:
        self.remote_peer = remote_peer
        self.info = info

    async def send(self, message: Message, *, codec: str = "none") -> None:
        """Takes anything."""

    async def receive(self, *, timeout_s: float) -> Message:
        return self.info

    async def close(self) -> None:
        NUM_OPEN[0] -= 1


class Swarm:
    """Directory and transport. Who is in ``silent`` accepts no stream; who is not in ``announced`` announces all."""

    def __init__(self, infos: dict[str, ServerInfo], silent: tuple[str, ...] = ()) -> None:
        self.infos = infos
        self.silent = silent
        self.announced: dict[str, ServerInfo] = {}

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        return dict.fromkeys([*self.silent, *self.infos], INFO) | self.announced

    async def open(self, peer: str, rpc: str, *, timeout_s: float) -> Channel:
        if peer in self.silent:
            await asyncio.sleep(timeout_s)
        if peer not in self.infos:
            raise TransportError(f"peer {peer} has left")
        NUM_OPEN[0] += 1
        return InfoChannel(peer, self.infos[peer])  # type: ignore[return-value]


def view_of(swarm: Swarm) -> SwarmView:
    config = SwarmConfig(info_timeout_s=0.2, connect_timeout_s=20.0)
    peers = Peers(swarm, config)  # type: ignore[arg-type]
    return SwarmView(swarm, peers, config, version=VERSION, num_blocks=4)


@pytest.mark.parametrize(
    "claim",
    [
        {"decode_s": math.nan},
        {"decode_s": -1.0},
        {"throughput": math.inf},
        {"throughput": math.nan},
        {"max_batch_tokens": -5},
        {"free_kv_tokens": 1 << 62},
        {"model": "\x1b[2Jtiny"},
    ],
    ids=str,
)
async def test_server_whose_claims_cannot_be_true_is_left_out(claim: dict[str, Any]) -> None:
    view = view_of(Swarm({"liar": msgspec.structs.replace(INFO, **claim), "honest": INFO}))
    assert [span.peer for span in await view.chain(range(4), Demand())] == ["honest"]
    assert view.banned() == ["liar"]


async def test_server_that_cannot_be_reached_holds_nobody_up() -> None:
    view = view_of(Swarm({"honest": INFO}, silent=("dead",)))
    started = time.monotonic()
    assert [span.peer for span in await view.chain(range(4), Demand())] == ["honest"]
    assert time.monotonic() - started < 10  # the time to connect alone would be 20 s


async def test_a_crowd_that_comes_and_goes_leaves_a_bounded_number_of_open_streams() -> None:
    infos = {f"p{index}": INFO for index in range(400)}
    view = view_of(Swarm(infos))
    NUM_OPEN[0] = 0
    for peer in [*infos, *infos]:
        await view.peers.info(peer)
    assert NUM_OPEN[0] == 256
    await view.peers.close()
    assert NUM_OPEN[0] == 0


async def test_banned_servers_take_nobodys_place_among_those_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.client.discovery.server_view._MAX_PROBES", 4)
    infos = {f"liar{i}": msgspec.structs.replace(INFO, decode_s=math.nan) for i in range(4)}
    view = view_of(Swarm({**infos, "honest": INFO}))
    for liar in infos:
        view.peers.book.observe(liar, Failed(""))
    # Were the banned in the sample, one of five would be left out at random.
    for _ in range(20):
        await view.refresh(force=True)
        assert [entry.peer for entry in view.usable()] == ["honest"]


async def test_a_server_that_takes_crumbs_cuts_nobodys_batches() -> None:
    crumbs = msgspec.structs.replace(INFO, max_batch_tokens=1)
    view = view_of(Swarm({"crumbs": crumbs, "roomy": msgspec.structs.replace(INFO, max_batch_tokens=4096)}))
    for _ in range(5):
        await view.refresh(force=True)
        assert [span.peer for span in await view.chain(range(4), Demand())] == ["roomy"]
        assert view.most_tokens(range(4)) == 4096
    # Its blocks are still used where nobody else has them.
    assert [span.peer for span in await view.chain(range(4), Demand(), without={"roomy"})] == ["crumbs"]


async def test_batches_are_cut_for_a_small_server_that_nobody_can_replace() -> None:
    view = view_of(Swarm({"small": msgspec.structs.replace(INFO, max_batch_tokens=8)}))
    assert [span.peer for span in await view.chain(range(4), Demand())] == ["small"]
    assert view.most_tokens(range(4)) == 8


async def test_a_flood_of_announcements_does_not_crowd_out_who_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.client.discovery.server_view._MAX_PROBES", 4)
    swarm = Swarm({"honest": INFO})
    view = view_of(swarm)
    await view.refresh(force=True)
    swarm.infos |= {f"flood{i}": msgspec.structs.replace(INFO, decode_s=math.nan) for i in range(200)}
    for _ in range(10):
        await view.refresh(force=True)
        assert [span.peer for span in await view.chain(range(4), Demand())] == ["honest"]


async def test_a_server_that_served_something_else_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.client.discovery.server_view._MAX_PROBES", 4)
    first, rest = (msgspec.structs.replace(INFO, start=start, end=end) for start, end in ((0, 1), (1, 4)))
    others = {f"p{index}": rest for index in range(5)}
    swarm = Swarm({"moving": msgspec.structs.replace(first, version="b" * 64), **others})
    view = view_of(swarm)
    now = 0.0
    view.peers.book._clock = lambda: now
    swarm.announced = {"moving": first, **others}
    await view.refresh(force=True)
    swarm.infos["moving"] = first
    await view.peers.close()  # its streams would tell what it said before
    now = 10.0
    await view.refresh(force=True)
    assert "moving" not in view.entries
    now = 3600.0
    await view.refresh(force=True)
    assert "moving" in view.entries
