"""Real libp2p peers on loopback: join, announce, find, exchange messages, leave."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.utils import timed_storage
from p2p_kit import INFO, client, echo, server

from swarm_plugins.errors import ConfigError, RequestTimeoutError, TransportError
from swarm_plugins.transport import dht
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import ForwardResponse
from swarm_plugins.transport.node import ModelInfo, NodeConfig, SwarmNode
from swarm_plugins.transport.server_info import InfoRequest

pytestmark = pytest.mark.swarm


async def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0.01)


async def can_be_found(peer_id: str, peers: Sequence[str]) -> None:
    """Waits until a member of the swarm reaches a peer by its id alone."""
    async with client(*peers) as asking:
        while True:
            try:
                return await asking._daemon.p2p._client.connect(PeerID.from_base58(peer_id), [])
            except P2PDaemonError:
                await asyncio.sleep(0.1)


async def look_for_ever(node: SwarmNode) -> None:
    while True:
        await node.servers("v1", 8)


async def test_a_server_joins_by_a_peer_that_is_busy_for_some_seconds() -> None:
    async with server() as first:
        addresses = await first.addresses()
        first._dht._loop.call_soon(lambda: time.sleep(4.0))  # as while it loads its blocks
        async with server(*addresses) as second:
            await second.announce(INFO, 60.0)
            assert set(await first.servers("v1", 8)) == {second.peer_id}


async def test_a_client_finds_a_server_and_talks_to_it() -> None:
    async with server() as host, client(*await host.addresses()) as guest:
        await host.announce(INFO, ttl_s=60.0)
        assert await guest.servers("v1", 8) == {host.peer_id: INFO}
        assert await guest.models() == {"v1": ModelInfo("m", 8, 1)}
        channel = await guest.open(host.peer_id, "rpc_forward", timeout_s=20.0)
        assert channel.remote_peer == host.peer_id
        for size in (1, 1000, 400_000, 3_000_000):
            sent = torch.randn(size)
            await channel.send(ForwardResponse(hidden=sent))
            received = await channel.receive(timeout_s=20.0)
            assert isinstance(received, ForwardResponse)
            assert torch.equal(received.hidden, sent)
        assert host.num_streams == 1
        await channel.close()
        while host.num_streams:
            await asyncio.sleep(0.02)
        assert await guest.addresses() == ()


async def test_the_handler_sees_the_proved_id_of_the_client() -> None:
    seen = []

    async def handler(channel: Channel) -> None:
        seen.append(channel.remote_peer)
        await echo(channel)

    async with SwarmNode() as host, client(*await host.addresses()) as guest:
        await host.serve({"rpc_session": handler})
        channel = await guest.open(host.peer_id, "rpc_session", timeout_s=20.0)
        await channel.send(InfoRequest())
        assert await channel.receive(timeout_s=20.0) == InfoRequest()
        assert seen == [guest.peer_id]


async def test_what_was_sent_before_close_arrives() -> None:
    arrived = asyncio.Event()
    sizes = []

    async def handler(channel: Channel) -> None:
        while isinstance(received := await channel.receive(timeout_s=20.0), ForwardResponse):
            sizes.append(received.hidden.numel())
        assert received is None
        arrived.set()

    async with SwarmNode() as host, client(*await host.addresses()) as guest:
        await host.serve({"rpc_push": handler})
        channel = await guest.open(host.peer_id, "rpc_push", timeout_s=20.0)
        for _ in range(3):
            await channel.send(ForwardResponse(hidden=torch.zeros(2_000_000)))
        await channel.close()
        await asyncio.wait_for(arrived.wait(), 30.0)
        assert sizes == [2_000_000] * 3


async def test_a_server_known_only_by_the_dht_can_be_reached() -> None:
    async with server() as first, server(*await first.addresses()) as second:
        await second.announce(INFO, ttl_s=60.0)
        async with client(*await first.addresses()) as guest:
            assert set(await guest.servers("v1", 8)) == {second.peer_id}
            channel = await guest.open(second.peer_id, "rpc_forward", timeout_s=20.0)
            await channel.send(InfoRequest())
            assert await channel.receive(timeout_s=20.0) == InfoRequest()


async def test_versions_and_models_of_other_depth_do_not_mix() -> None:
    async with server() as first, server(*await first.addresses()) as second:
        await first.announce(INFO, ttl_s=60.0)
        other = msgspec.structs.replace(INFO, version="v2", num_blocks=9)
        await second.announce(other, ttl_s=60.0)
        async with client(*await first.addresses()) as guest:
            assert await guest.servers("v1", 8) == {first.peer_id: INFO}
            assert await guest.servers("v2", 9) == {second.peer_id: other}
            assert await guest.servers("v2", 8) == {}
            assert set(await guest.models()) == {"v1", "v2"}


async def test_announcements_are_renewed_moved_and_retracted() -> None:
    async with server() as host, client(*await host.addresses()) as guest:
        await host.announce(INFO, ttl_s=60.0)
        # A shorter life than the last time: the newer record must win all the same.
        moved = msgspec.structs.replace(INFO, start=4, end=8)
        await host.announce(moved, ttl_s=50.0)
        assert await guest.servers("v1", 8) == {host.peer_id: moved}
        upgraded = msgspec.structs.replace(moved, version="v2")
        await host.announce(upgraded, ttl_s=60.0)
        assert await guest.servers("v1", 8) == {}
        assert await guest.servers("v2", 8) == {host.peer_id: upgraded}
        assert set(await guest.models()) == {"v2"}
        await host.retract()
        await host.retract()
        assert await guest.servers("v2", 8) == {}
        assert await guest.models() == {}
        await host.announce(upgraded, ttl_s=60.0)
        assert await guest.servers("v2", 8) == {host.peer_id: upgraded}


async def test_records_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server() as host, client(*await host.addresses()) as guest:
        await host.announce(INFO, ttl_s=60.0)
        assert set(await guest.servers("v1", 8)) == {host.peer_id}
        monkeypatch.setattr(timed_storage, "get_dht_time", lambda: time.time() + 61.0)
        assert await guest.servers("v1", 8) == {}


async def test_records_outlive_the_node_that_others_joined_by() -> None:
    async with SwarmNode() as first:
        addresses = await first.addresses()
        async with server(*addresses) as second:
            await second.announce(INFO, ttl_s=60.0)
            await first.close()
            async with client(*await second.addresses()) as guest:
                assert set(await guest.servers("v1", 8)) == {second.peer_id}


async def test_a_dead_server_is_noticed_at_once() -> None:
    async with server() as host, client(*await host.addresses()) as guest:
        peer = host.peer_id
        channel = await guest.open(peer, "rpc_forward", timeout_s=20.0)
        await channel.send(InfoRequest())
        assert await channel.receive(timeout_s=20.0) == InfoRequest()
        started = time.monotonic()
        waiting = asyncio.create_task(channel.receive(timeout_s=30.0))
        await asyncio.sleep(0.05)
        os.kill(host._daemon.pid, signal.SIGKILL)
        with pytest.raises(TransportError, match=f"the stream to peer {peer} broke"):
            await waiting
        with pytest.raises(TransportError, match=f"peer {peer} cannot be reached"):
            await guest.open(peer, "rpc_forward", timeout_s=20.0)
        assert time.monotonic() - started < 19.0  # a plain hivemind node waits for ever


async def test_the_death_of_the_own_daemon_ends_all_waiting() -> None:
    async with server() as host, client(*await host.addresses()) as guest:
        channel = await guest.open(host.peer_id, "rpc_forward", timeout_s=20.0)
        waiting = asyncio.create_task(channel.receive(timeout_s=30.0))
        await asyncio.sleep(0.05)
        looking = asyncio.create_task(look_for_ever(guest))
        await asyncio.sleep(0.05)
        os.kill(guest._daemon.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(TransportError, match="broke"):
            await waiting
        with pytest.raises(TransportError, match=r"libp2p daemon of this node has ended \(exit code -9\)"):
            await looking
        with pytest.raises(TransportError, match="start a new node"):
            await guest.servers("v1", 8)
        with pytest.raises(TransportError, match="start a new node"):
            await guest.open(host.peer_id, "rpc_forward", timeout_s=20.0)
        await guest.wait_dead()
        assert not guest.is_alive
        assert host.is_alive
        assert time.monotonic() - started < 19.0  # a plain hivemind node waits for ever


async def test_a_peer_that_does_not_answer_times_out() -> None:
    async with server() as host, client(*await host.addresses()) as guest:
        await freeze(host._daemon.pid)
        try:
            # libp2p opens a stream of a known protocol without waiting for the other end.
            channel = await guest.open(host.peer_id, "rpc_forward", timeout_s=20.0)
            await channel.send(InfoRequest())
            with pytest.raises(RequestTimeoutError, match=rf"no message from peer {host.peer_id} within 0\.3 s"):
                await channel.receive(timeout_s=0.3)
        finally:
            os.kill(host._daemon.pid, signal.SIGCONT)


async def test_an_rpc_that_is_not_served_is_an_error() -> None:
    async with server() as host, client(*await host.addresses()) as guest:
        with pytest.raises(TransportError, match=r"\w+ does not serve /swarm_plugins/1/rpc_adapter: protoc"):
            await guest.open(host.peer_id, "rpc_adapter", timeout_s=5.0)


async def test_a_node_cannot_be_used_before_start_or_after_close() -> None:
    node = SwarmNode()
    with pytest.raises(TransportError, match="call start"):
        _ = node.peer_id
    await node.start()
    with pytest.raises(ConfigError, match="started already"):
        await node.start()
    await node.close()
    await node.close()
    assert not node.is_alive
    with pytest.raises(TransportError, match="nothing after close"):
        await node.servers("v1", 8)


async def test_clients_neither_serve_nor_announce() -> None:
    async with server() as host, client(*await host.addresses()) as guest:
        with pytest.raises(ConfigError, match="a client cannot serve"):
            await guest.serve({"rpc_info": echo})
        with pytest.raises(ConfigError, match="a client cannot announce"):
            await guest.announce(INFO, 10.0)
        with pytest.raises(ConfigError, match="ttl_s must be above 0 and at most 3600, got 7200"):
            await host.announce(INFO, 7200.0)
        with pytest.raises(ConfigError, match="cannot announce this: server claims blocks"):
            await host.announce(msgspec.structs.replace(INFO, end=99), 10.0)


async def test_initial_peers_that_cannot_be_reached_are_named() -> None:
    async with server() as host:
        (address,) = await host.addresses()
    with pytest.raises(TransportError, match=f"none of the initial peers can be reached: {address}"):
        await SwarmNode(NodeConfig(initial_peers=(address,), host_maddrs=())).start()


async def test_one_dead_initial_peer_among_living_ones_does_no_harm() -> None:
    async with server() as gone:
        (dead,) = await gone.addresses()
    async with server() as host:
        await host.announce(INFO, 60.0)
        async with client(dead, *await host.addresses()) as guest:
            assert set(await guest.servers("v1", 8)) == {host.peer_id}


async def test_an_identity_copied_to_another_machine_is_refused(tmp_path: Path) -> None:
    async with server() as first:
        peers = await first.addresses()
        config = NodeConfig(identity=tmp_path / "id", initial_peers=peers)
        async with SwarmNode(config) as original:
            shutil.copy(tmp_path / "id", tmp_path / "copy")
            copied = NodeConfig(identity=tmp_path / "copy", initial_peers=peers)
            # Others can only be told of a peer that they know: the first one has to have heard where it is.
            await can_be_found(original.peer_id, peers)
            with pytest.raises(ConfigError, match=f"another peer of the swarm.*copy.*{original.peer_id}.*own file"):
                await SwarmNode(copied).start()
            peer = original.peer_id
        async with SwarmNode(config) as again:
            assert again.peer_id == peer


async def test_a_record_left_by_an_earlier_run_gives_way(tmp_path: Path) -> None:
    async with server() as first:
        config = NodeConfig(identity=tmp_path / "id", initial_peers=await first.addresses())
        async with SwarmNode(config) as earlier:
            await earlier.announce(INFO, ttl_s=600.0)
        async with SwarmNode(config) as later:
            moved = msgspec.structs.replace(INFO, start=4, end=8)
            await later.announce(moved, ttl_s=60.0)
            assert await first.servers("v1", 8) == {later.peer_id: moved}


@pytest.mark.parametrize("jump_s", [3600.0, 365 * 86_400.0], ids=["hour", "year"])
async def test_a_clock_that_was_ahead_for_a_while_leaves_no_server_unlisted(
    monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    async with server() as first, server(*await first.addresses()) as node:
        with monkeypatch.context() as jumped:
            jumped.setattr(dht, "time", SimpleNamespace(time=lambda: time.time() + jump_s))
            with pytest.raises(TransportError, match="check this machine's clock"):
                await node.announce(INFO, ttl_s=3600.0)
        await node.announce(INFO, ttl_s=60.0)
        assert await first.servers("v1", 8) == {node.peer_id: INFO}


async def test_a_port_in_use_and_a_shared_identity_are_refused(tmp_path: Path) -> None:
    async with SwarmNode(NodeConfig(identity=tmp_path / "id")) as host:
        (address,) = await host.addresses()
        port_address = address.split("/p2p/")[0]
        with pytest.raises(ConfigError, match=f"cannot listen on {port_address}: Address already in use"):
            await SwarmNode(NodeConfig(host_maddrs=(port_address,))).start()
        with pytest.raises(ConfigError, match="in use by another node on this machine"):
            await SwarmNode(NodeConfig(identity=tmp_path / "id")).start()
        peer = host.peer_id
    async with SwarmNode(NodeConfig(identity=tmp_path / "id", host_maddrs=(port_address,))) as again:
        assert again.peer_id == peer
        assert await again.addresses() == (address,)


async def test_a_script_that_closes_nothing_ends_without_a_word() -> None:
    script = (
        "import sys; from swarm_plugins import SwarmConfig; from swarm_plugins.client import connect; "
        "kept = connect(sys.argv[1:], SwarmConfig()).start(); print(kept.network is not None)"
    )
    async with server() as host:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", script, *await host.addresses()),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, complained = await process.communicate()
        assert said == b"True\n"
        assert b"Traceback" not in complained, complained.decode()
