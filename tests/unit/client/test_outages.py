"""What a client does while servers and directory are gone, and how soon it goes on after that."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from client_kit import VERSION, server_info

from swarm_plugins.block_io import SpanInputs
from swarm_plugins.book import judging
from swarm_plugins.book.record import PeerBook
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.discovery.view import SwarmView
from swarm_plugins.client.peers import Peers
from swarm_plugins.client.servers import Servers
from swarm_plugins.client.training.batch import BatchCall
from swarm_plugins.errors import MissingBlocksError, RequestTimeoutError, TransportError
from swarm_plugins.routing import Demand
from swarm_plugins.testing import InProcessSwarm, save_tiny
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.channel import Channel, Handler
from swarm_plugins.transport.messages import Failure, ForwardRequest, ForwardResponse, Message
from swarm_plugins.transport.server_info import ServerInfo


class Machine:
    """A server that can be frozen: then it answers nothing."""

    def __init__(self, start: int, end: int, num_blocks: int) -> None:
        self.info = server_info(start, end, num_blocks)
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.is_stuck = False
        """Whether it says what it serves, but computes nothing."""
        self.is_broken = False
        self.asked = 0

    def handlers(self) -> dict[str, Handler]:
        async def handle(channel: Channel) -> None:
            while (message := await channel.receive(timeout_s=60.0)) is not None:
                await self.thawed.wait()
                answer = self.answer(message)
                if not (self.is_stuck and isinstance(message, ForwardRequest)):
                    await channel.send(answer)

        return dict.fromkeys(("rpc_info", "rpc_forward"), handle)

    def answer(self, message: Message) -> Message:
        if not isinstance(message, ForwardRequest):
            return self.info
        self.asked += 1
        if self.is_broken:
            return Failure(kind="internal", message="broken")
        return ForwardResponse(hidden=message.hidden + 1)


class Swarm(LocalTransport):
    """Machines and a directory that may hang, or name some of them only."""

    def __init__(self, machines: dict[str, Machine]) -> None:
        super().__init__({peer: machine.handlers() for peer, machine in machines.items()})
        self.machines = machines
        self.named = set(machines)
        self.late_s = 0.0

    async def servers(self, version: str, num_blocks: int) -> dict[str, ServerInfo]:
        await asyncio.sleep(self.late_s)
        return {peer: self.machines[peer].info for peer in self.named}

    def freeze(self, *peers: str) -> None:
        for peer in peers:
            self.machines[peer].thawed.clear()

    def thaw(self) -> None:
        for machine in self.machines.values():
            machine.thawed.set()


def judge_by(book: PeerBook, *, slack_s: float) -> None:
    book.rules = replace(book.rules, slack_s=slack_s)
    for record in book.records().values():
        record.rules = book.rules


@contextlib.asynccontextmanager
async def swarm_of(spans: dict[str, tuple[int, int]], **settings: Any) -> AsyncIterator[tuple[Swarm, Servers]]:
    num_blocks = max(end for _, end in spans.values())
    swarm = Swarm({peer: Machine(*span, num_blocks) for peer, span in spans.items()})
    peers = Peers(swarm, SwarmConfig(**settings))
    judge_by(peers.book, slack_s=0.3)
    view = SwarmView(swarm, peers, peers.config, version=VERSION, num_blocks=num_blocks)
    try:
        yield swarm, Servers(peers, view)
    finally:
        swarm.thaw()
        await peers.close()
        await swarm.close()


async def forward(servers: Servers) -> None:
    inputs = SpanInputs(blocks=range(servers.view.num_blocks), hidden=torch.zeros(1, 2, 4))
    await BatchCall(servers, inputs, keep=False).forward()


@pytest.mark.parametrize("directory_hangs", [False, True], ids=["servers", "servers-and-directory"])
async def test_all_servers_frozen_is_an_error_in_seconds_and_over_at_once(directory_hangs: bool) -> None:
    async with swarm_of({"a": (0, 2), "b": (2, 4)}) as (swarm, servers):
        await forward(servers)
        swarm.freeze("a", "b")
        swarm.late_s = 60.0 if directory_hangs else 0.0
        for _ in range(2):
            started = time.monotonic()
            with pytest.raises(MissingBlocksError, match="no living server holds blocks"):
                await forward(servers)
            assert time.monotonic() - started < 8
        swarm.thaw()
        # The directory stays silent: those that are known are asked all the same.
        started = time.monotonic()
        await forward(servers)
        assert time.monotonic() - started < 5


async def test_a_call_that_a_short_outage_hits_goes_on_after_it() -> None:
    async with swarm_of({"a": (0, 2), "b": (2, 4)}) as (swarm, servers):
        await forward(servers)
        swarm.freeze("a")
        asyncio.get_running_loop().call_later(1.5, swarm.thaw)
        await forward(servers)


async def test_the_only_holder_of_a_block_is_asked_again_soon_though_it_has_failed_often() -> None:
    async with swarm_of({"a": (0, 2), "b": (2, 4), "c": (2, 4), "d": (2, 4)}) as (_, servers):
        await forward(servers)
        for _ in range(9):
            servers.view.ban("a", TransportError("gone"))
        assert judging.is_banned(servers.view.peers.book, "a")
        started = time.monotonic()
        await forward(servers)
        assert time.monotonic() - started < 5
        assert not judging.is_banned(servers.view.peers.book, "a")
        # While there are others, a banned one is asked but not used.
        await servers.view.refresh(force=True)
        servers.view.ban("b", TransportError("gone"))
        await servers.view.refresh(force=True)
        assert {entry.peer for entry in servers.view.usable()} == {"a", "c", "d"}
        servers.view.ban("c", TransportError("gone"))
        await servers.view.refresh(force=True)
        assert {entry.peer for entry in servers.view.usable()} == {"a", "d"}


async def test_a_banned_server_is_asked_though_others_look_better_as_these_may_hang() -> None:
    async with swarm_of(dict.fromkeys("abc", (0, 2))) as (swarm, servers):
        await forward(servers)
        swarm.freeze("a", "b")
        servers.view.ban("c", TransportError("late"))
        await servers.view.refresh(force=True)
        assert [entry.peer for entry in servers.view.usable()] == ["c"]


async def test_a_server_that_was_silent_once_helps_when_the_other_one_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.client.calls.retries._PATIENCE_S", 1.0)
    async with swarm_of({"a": (0, 2), "b": (0, 2)}) as (swarm, servers):
        await forward(servers)
        [first] = await servers.view.chain(range(2), Demand(tokens=2))
        other = "b" if first.peer == "a" else "a"
        # Its answer is lost, and until that is noticed, it is well again and the other one has stopped.
        swarm.freeze(first.peer)
        judge_by(servers.peers.book, slack_s=1.5)

        def change() -> None:
            swarm.freeze(other)
            swarm.machines[first.peer].thawed = asyncio.Event()
            swarm.machines[first.peer].thawed.set()

        asyncio.get_running_loop().call_later(1.0, change)
        await forward(servers)


async def test_the_only_holder_that_always_fails_ends_in_missing_blocks() -> None:
    async with swarm_of({"a": (0, 2)}, max_retries=3) as (swarm, servers):
        swarm.machines["a"].is_broken = True
        with pytest.raises(MissingBlocksError, match=r"left out after failures: a; the last failure: .*broken"):
            await forward(servers)
        assert swarm.machines["a"].asked == 3


async def test_the_only_holder_that_hangs_in_its_work_is_not_waited_for_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm_plugins.client.calls.retries._PATIENCE_S", 0.1)
    async with swarm_of({"a": (0, 2)}, request_timeout_s=0.8) as (swarm, servers):
        # It does not notice that it hangs.
        swarm.machines["a"].is_stuck = True
        with pytest.raises(
            MissingBlocksError, match=r"left out after failures: a; the last failure: no message from a"
        ):
            await forward(servers)
        assert swarm.machines["a"].asked == 2
        # Another call asks again.
        swarm.machines["a"].is_stuck = False
        await forward(servers)


async def test_a_late_server_that_is_frozen_is_given_up_however_long_its_work_may_take() -> None:
    async with swarm_of({"a": (0, 2)}) as (swarm, servers):
        await forward(servers)
        judge_by(servers.peers.book, slack_s=60.0)
        started = time.monotonic()
        asyncio.get_running_loop().call_later(0.1, swarm.freeze, "a")
        swarm.machines["a"].is_stuck = True
        with pytest.raises(MissingBlocksError, match=r"within 5.* it is not at work: it did not report what it serves"):
            await forward(servers)
        assert time.monotonic() - started < 8


def compute(swarm: InProcessSwarm, *pieces: Callable[[], object]) -> None:
    """Gives the first server other work."""

    async def post() -> None:
        for piece in pieces:
            swarm.services["peer0"].scheduler.post(piece)

    swarm.connection.loop.run(post())


@pytest.mark.slow
@pytest.mark.parametrize("is_new", [True, False], ids=["first-request", "later-request"])
def test_the_only_holder_whose_compute_hangs_is_given_up_and_used_again_later(tmp_path: Path, is_new: bool) -> None:
    directory = save_tiny("llama", tmp_path)
    inputs = SpanInputs(blocks=range(4), hidden=torch.ones(1, 2, 32))
    with InProcessSwarm(directory, spans=[(0, 4)]) as swarm:
        blocks = swarm.connection.blocks(version=Checkpoint.open(directory).version, num_blocks=4)
        blocks.check()
        if not is_new:
            want = blocks.forward(inputs).hidden
        held = threading.Event()
        service = swarm.services["peer0"]
        quick = msgspec.structs.replace(service.info(), decode_s=0.001)
        service.info = lambda: quick
        compute(swarm, lambda: held.wait(120.0))

        def seconds_until_missing() -> float:
            started = time.monotonic()
            with pytest.raises(MissingBlocksError, match=r"server peer0 hangs in its work|no message from peer0"):
                blocks.forward(inputs)
            return time.monotonic() - started

        try:
            for _ in range(1 if is_new else 2):
                # 5 s on an idle machine; it was request_timeout_s, 120 s.
                assert seconds_until_missing() < 60
        finally:
            held.set()
        got = blocks.forward(inputs).hidden
        assert is_new or torch.equal(got, want)


@pytest.mark.slow
def test_the_only_holder_is_waited_for_while_it_gets_on_with_the_work_of_others(tmp_path: Path) -> None:
    directory = save_tiny("llama", tmp_path)
    inputs = SpanInputs(blocks=range(4), hidden=torch.ones(1, 2, 32))
    with InProcessSwarm(directory, spans=[(0, 4)]) as swarm:
        blocks = swarm.connection.blocks(version=Checkpoint.open(directory).version, num_blocks=4)
        want = blocks.forward(inputs).hidden
        compute(swarm, *[lambda: time.sleep(0.5)] * 18)
        assert torch.equal(blocks.forward(inputs).hidden, want)


async def test_a_directory_that_has_lost_some_servers_hides_none_that_answers() -> None:
    async with swarm_of({"a": (0, 2), "b": (2, 4)}) as (swarm, servers):
        await forward(servers)
        # As a first server that was started again: it knows itself.
        swarm.named = {"a"}
        for _ in range(2):
            await servers.view.refresh(force=True)
        assert set(servers.view.entries) == {"a", "b"}
        await swarm.kill("b")
        for _ in range(2):
            await servers.view.refresh(force=True)
        assert set(servers.view.entries) == {"a"}


async def test_a_late_answer_of_the_directory_counts_when_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.client.discovery.lookup._PATIENCE_S", 0.01)
    async with swarm_of({"a": (0, 2), "b": (2, 4)}) as (swarm, servers):
        swarm.named = {"a"}
        await servers.view.refresh(force=False)
        swarm.named, swarm.late_s = {"a", "b"}, 0.1
        await servers.view.refresh(force=True)
        assert set(servers.view.entries) == {"a"}
        while not servers.view.is_stale:
            await asyncio.sleep(0.01)
        await servers.view.refresh(force=False)
        assert set(servers.view.entries) == {"a", "b"}


async def test_one_frozen_server_beside_an_idle_replica_costs_its_first_deadline_at_most() -> None:
    async with swarm_of({"a": (0, 4), "b": (0, 4)}) as (swarm, servers):
        await servers.view.refresh(force=False)
        (first,) = await servers.view.chain(range(4), Demand())
        swarm.freeze(first.peer)
        started = time.monotonic()
        await forward(servers)
        assert time.monotonic() - started < 12  # 5 s; it was request_timeout_s, 120 s


async def test_replicas_that_hang_too_are_not_tried_one_after_the_other() -> None:
    async with swarm_of(dict.fromkeys("abcd", (0, 4))) as (swarm, servers):
        await forward(servers)
        swarm.freeze(*"abcd")
        started = time.monotonic()
        with pytest.raises(MissingBlocksError):
            await forward(servers)
        assert time.monotonic() - started < 8


async def test_deadlines_of_streams_that_do_not_open_are_learnt_too() -> None:
    async with swarm_of({"a": (0, 4), "b": (0, 4)}) as (swarm, servers):
        timeouts: list[float] = []

        async def hang(peer: str, rpc: str, *, timeout_s: float) -> Channel:
            timeouts.append(timeout_s)
            raise RequestTimeoutError("no stream")

        await (await servers.peers.open("a", "rpc_forward")).close()
        swarm.open = hang  # type: ignore[method-assign]
        for peer in ("a", "b"):
            with pytest.raises(RequestTimeoutError):
                await servers.peers.open(peer, "rpc_forward")
        assert timeouts[0] < 1.0
        assert 5.0 <= timeouts[1] < 6.0


def test_a_banned_server_is_asked_when_the_one_preferred_to_it_has_gone(tmp_path: Path) -> None:
    directory = save_tiny("llama", tmp_path)
    inputs = SpanInputs(blocks=range(4), hidden=torch.ones(1, 2, 32))
    with InProcessSwarm(directory, spans=[(0, 4), (0, 4)]) as swarm:
        blocks = swarm.connection.blocks(version=Checkpoint.open(directory).version, num_blocks=4)
        want = blocks.forward(inputs).hidden
        swarm.kill("peer1")
        # As found when a call begins: one has just been banned, and nobody has missed the other one yet.
        blocks.view.ban("peer0", TransportError("gone"))
        blocks.view.entries = {}
        blocks.view.doubt()
        assert torch.equal(blocks.forward(inputs).hidden, want)


async def test_blocks_that_another_server_is_loading_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_plugins.client.calls.retries._PATIENCE_S", 0.1)
    async with swarm_of({"a": (0, 2), "b": (2, 4), "spare": (2, 4)}, max_retries=2) as (swarm, servers):
        await forward(servers)
        mover = swarm.machines["spare"]
        await swarm.kill("a")
        swarm.named.discard("a")
        with pytest.raises(MissingBlocksError, match="0:2"):
            await forward(servers)
        mover.info = msgspec.structs.replace(mover.info, target=(0, 2))
        running = asyncio.create_task(forward(servers))
        await asyncio.sleep(1.0)
        assert not running.done()
        mover.info = msgspec.structs.replace(mover.info, target=None, start=0, end=2)
        await running
