"""Nodes that talk with some peers only, without a DHT, or without a port of their own."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from hivemind.p2p import P2P, P2PHandlerError, PeerID
from hivemind.proto import dht_pb2
from p2p_kit import INFO, client, echo, server

from swarm_plugins.errors import TransportError
from swarm_plugins.transport.admission.gate import PROOF_PROTOCOL
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.identity import create_identity_file, load_identity
from swarm_plugins.transport.messages import Failure
from swarm_plugins.transport.node import NodeConfig, SwarmNode
from swarm_plugins.transport.p2p_channel import protocol_name
from swarm_plugins.transport.reach import relays
from swarm_plugins.transport.server_info import InfoRequest

pytestmark = pytest.mark.swarm


async def tell_info(channel: Channel) -> None:
    while await channel.receive(timeout_s=30.0) is not None:
        await channel.send(INFO)


async def is_served(node: SwarmNode, peer: str) -> bool:
    channel = await node.open(peer, "rpc_forward", timeout_s=5.0)
    await channel.send(InfoRequest())
    answer = await channel.receive(timeout_s=5.0)
    await channel.close()
    assert isinstance(answer, InfoRequest) or (isinstance(answer, Failure) and answer.kind == "refused")
    return isinstance(answer, InfoRequest)


def secret_file(path: Path, secret: str) -> Path:
    path.touch(0o600)
    path.write_text(secret + "\n")
    return path


async def test_a_static_swarm_needs_no_dht() -> None:
    static: dict[str, Any] = {"discovery": "static"}
    async with server(**static) as first, server(**static) as second:
        for one in (first, second):
            await one.serve({"rpc_info": tell_info})
            await one.announce(INFO, 60.0)
        addresses = [*await first.addresses(), *await second.addresses()]
        gone = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWHLz3Rf22AevvgSVAb2EuQsCcmWzyWmWSv76CST7TrNk8"
        async with client(*addresses, gone, **static) as asking:
            assert set(await asking.servers("v1", 8)) == {first.peer_id, second.peer_id}
            assert (await asking.models())["v1"].num_servers == 2
            assert await asking.servers("v2", 8) == {}
            assert not asking.is_alone
            assert await is_served(asking, second.peer_id)
            await second.close()
            assert set(await asking.servers("v1", 8)) == {first.peer_id}
        with pytest.raises(TransportError, match="do not answer as members of a swarm"):
            async with client(*await first.addresses()):
                pass
        with pytest.raises(TransportError, match="none of the initial peers can be reached"):
            async with client(gone, **static):
                pass


async def test_a_private_swarm_serves_and_asks_only_peers_that_know_its_secret(tmp_path: Path) -> None:
    ours = secret_file(tmp_path / "ours", "correct horse battery staple")
    other = secret_file(tmp_path / "other", "another horse battery staple")

    async def check_refusals(victim: SwarmNode) -> None:
        attacker = await P2P.create(initial_peers=await victim.addresses(), dht_mode="client", no_listen=True)
        peer = PeerID.from_base58(victim.peer_id)
        try:
            with pytest.raises(P2PHandlerError, match="has not proved that it knows this swarm's secret"):
                await attacker.call_protobuf_handler(
                    peer, "DHTProtocol.rpc_find", dht_pb2.FindRequest(keys=[bytes(20)]), dht_pb2.FindResponse
                )
            # Before the stranger has said anything; a guess of the proof is answered by nothing.
            _, reader, writer = await attacker.call_binary_stream_handler(peer, protocol_name("rpc_forward"))
            with contextlib.closing(writer):
                assert b"refused" in await asyncio.wait_for(reader.read(), 5.0)
            _, reader, writer = await attacker.call_binary_stream_handler(peer, PROOF_PROTOCOL)
            with contextlib.closing(writer):
                writer.write(bytes(32))
                await reader.readexactly(32)
                writer.write(bytes(32))
                assert await asyncio.wait_for(reader.read(), 5.0) == b""
        finally:
            await attacker.shutdown()

    async with server(secret_file=ours) as first:
        await first.serve({"rpc_info": tell_info})
        await first.announce(INFO, 60.0)
        addresses = await first.addresses()
        async with server(*addresses, secret_file=ours) as second, client(*addresses, secret_file=ours) as member:
            await second.announce(INFO, 60.0)
            assert set(await member.servers("v1", 8)) == {first.peer_id, second.peer_id}
            assert await is_served(member, first.peer_id)
            assert await is_served(second, first.peer_id)
            assert await is_served(first, second.peer_id)
        for stranger, reason in (
            ({"secret_file": other}, f"peer {first.peer_id} does not belong to this private swarm"),
            ({}, "has not proved that it knows this swarm's secret"),
        ):
            with pytest.raises(TransportError, match=reason):
                async with client(*addresses, **stranger):
                    pass
        await check_refusals(first)


async def test_a_server_that_does_not_know_the_secret_is_told_nothing(tmp_path: Path) -> None:
    ours = secret_file(tmp_path / "ours", "correct horse battery staple")
    heard: list[bytes] = []

    async def impersonate(_: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            heard.append(await reader.readexactly(32))
            writer.write(bytes(32))
            heard.append(await reader.readexactly(32))
            writer.write(heard[-1])  # the caller's own proof, sent back
            heard.append(await reader.read())

    async with server() as impostor:
        addresses = await impostor.addresses()
        async with server(secret_file=ours, known_peers=addresses) as member:
            with pytest.raises(TransportError, match="does not belong to this private swarm"):
                await member.open(impostor.peer_id, "rpc_forward", timeout_s=5.0)
            await impostor._daemon.p2p.add_binary_stream_handler(PROOF_PROTOCOL, impersonate)
            with pytest.raises(TransportError, match="does not belong to this private swarm"):
                await member.open(impostor.peer_id, "rpc_forward", timeout_s=5.0)
            while len(heard) < 3:
                await asyncio.sleep(0.05)
            assert heard[2] == b""
            assert impostor.num_streams == 0


async def test_a_server_with_a_list_of_peers_serves_no_others(tmp_path: Path) -> None:
    create_identity_file(tmp_path / "guest")
    guest_id = load_identity(tmp_path / "guest").peer_id
    async with server(allowed_peers=(guest_id,)) as host:
        await host.serve({"rpc_info": tell_info})
        await host.announce(INFO, 60.0)
        addresses = await host.addresses()
        async with client(*addresses, identity=tmp_path / "guest") as guest:
            assert set(await guest.servers("v1", 8)) == {host.peer_id}
            assert await is_served(guest, host.peer_id)
        with pytest.raises(TransportError, match=r"peer \w+ is not among the allowed peers of"):
            async with client(*addresses):
                pass
        async with client(*addresses, discovery="static") as stranger:
            with pytest.raises(TransportError, match="is not among the allowed peers of"):
                await stranger.servers("v1", 8)
            assert not await is_served(stranger, host.peer_id)


async def test_a_peer_that_listens_nowhere_is_reached_through_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server() as relay:
        addresses = await relay.addresses()
        hidden = SwarmNode(NodeConfig(initial_peers=addresses, relays=addresses, host_maddrs=()))
        async with hidden:
            await hidden.serve({"rpc_forward": echo, "rpc_info": tell_info})
            await hidden.announce(INFO, 60.0)
            (address,) = await hidden.addresses()
            assert address == f"{addresses[0]}/p2p-circuit/p2p/{hidden.peer_id}"
            # By the DHT, and by the address alone.
            for settings in ({}, {"discovery": "static"}):
                joins_by = addresses if not settings else (address,)
                async with client(*joins_by, **settings) as asking:
                    assert set(await asking.servers("v1", 8)) == {hidden.peer_id}
                    assert await is_served(asking, hidden.peer_id)
            with pytest.raises(TransportError, match=r"gives this node no place \(status 202\)"):
                await SwarmNode(NodeConfig(relays=(address,), host_maddrs=())).start()
        none = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWHLz3Rf22AevvgSVAb2EuQsCcmWzyWmWSv76CST7TrNk8"
        with pytest.raises(TransportError, match=r"relay /ip4/127.0.0.1/tcp/9/p2p/\w+ cannot be reached"):
            await SwarmNode(NodeConfig(initial_peers=addresses, relays=(none,), host_maddrs=())).start()
        monkeypatch.setattr(relays, "_HOP", "/none")  # every daemon of hivemind is a relay
        with pytest.raises(TransportError, match="is not a relay: the peer there passes no streams on"):
            await SwarmNode(NodeConfig(relays=addresses, host_maddrs=())).start()
