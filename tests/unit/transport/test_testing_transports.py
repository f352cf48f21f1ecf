"""The transports of the test kit behave like the real one, and fail on purpose."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch
import virtual_time

from swarm_plugins.errors import ConfigError, ProtocolError, RequestTimeoutError, TransportError
from swarm_plugins.testing.transports import Faults, FaultyTransport, LocalTransport
from swarm_plugins.transport.channel import Channel, Handler
from swarm_plugins.transport.messages import Failure, ForwardResponse
from swarm_plugins.transport.server_info import InfoRequest, ServerInfo

INFO = ServerInfo(version="v", model="m", num_blocks=2, start=0, end=2, dtype="float32", quantization="none")


async def echo(channel: Channel) -> None:
    while (received := await channel.receive(timeout_s=5.0)) is not None:
        await channel.send(received)


async def info(channel: Channel) -> None:
    await channel.receive(timeout_s=5.0)
    await channel.send(INFO)


def handlers() -> dict[str, dict[str, Handler]]:
    return {"a": {"rpc_forward": echo, "rpc_info": info}, "b": {"rpc_info": info}}


async def test_messages_go_there_and_back_through_the_encoder() -> None:
    transport = LocalTransport(handlers())
    channel = await transport.open("a", "rpc_forward", timeout_s=10.0)
    sent = torch.randn(3, 5)
    await channel.send(ForwardResponse(hidden=sent))
    received = await channel.receive(timeout_s=10.0)
    assert isinstance(received, ForwardResponse)
    assert torch.equal(received.hidden, sent)
    assert received.hidden.data_ptr() != sent.data_ptr()
    await channel.close()
    with pytest.raises(TransportError, match="closed"):
        await channel.send(InfoRequest())
    async with asyncio.timeout(5):
        while transport.num_live_channels:
            await asyncio.sleep(0.01)
    await transport.close()


async def test_peers_that_are_not_there_cannot_be_reached() -> None:
    transport = LocalTransport(handlers())
    for peer, rpc in [("c", "rpc_info"), ("b", "rpc_forward")]:
        with pytest.raises(TransportError, match="cannot be reached"):
            await transport.open(peer, rpc, timeout_s=10.0)
    with pytest.raises(ConfigError, match="unknown rpc"):
        await transport.open("a", "rpc_x", timeout_s=10.0)


async def test_killing_a_peer_breaks_its_channels_and_hides_it() -> None:
    transport = LocalTransport(handlers())
    assert await transport.servers("v", 2) == {"a": INFO, "b": INFO}
    assert await transport.servers("w", 2) == {}
    channel = await transport.open("a", "rpc_forward", timeout_s=10.0)
    await transport.kill("a")
    with pytest.raises(TransportError, match="broken"):
        await channel.receive(timeout_s=10.0)
    with pytest.raises(TransportError, match="cannot be reached"):
        await transport.open("a", "rpc_forward", timeout_s=10.0)
    assert set(await transport.servers("v", 2)) == {"b"}
    transport.revive("a")
    assert set(await transport.servers("v", 2)) == {"a", "b"}
    await transport.close()


async def test_a_handler_that_fails_answers_with_its_fault(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(channel: Channel) -> None:
        raise ValueError("oops")

    with caplog.at_level(logging.ERROR):
        transport = LocalTransport({"a": {"rpc_info": broken}})
        channel = await transport.open("a", "rpc_info", timeout_s=10.0)
        assert await channel.receive(timeout_s=10.0) == Failure(kind="internal", message="ValueError: oops")
        assert await channel.receive(timeout_s=10.0) is None
        await transport.close()
    assert "handler failed" in caplog.text


async def outcomes(faults: Faults, seed: int, rounds: int = 12) -> list[str]:
    transport = FaultyTransport(LocalTransport(handlers()), faults, seed=seed)
    seen = []
    for _ in range(rounds):
        try:
            channel = await transport.open("a", "rpc_forward", timeout_s=10.0)
            await channel.send(ForwardResponse(hidden=torch.zeros(50)))
            # Short only where an answer may never come.
            received = await channel.receive(timeout_s=0.2 if faults.drop else 5.0)
            assert isinstance(received, ForwardResponse)
            seen.append("same" if not received.hidden.any() else "changed")
        except (TransportError, AssertionError) as exc:
            seen.append(type(exc).__name__)
    await transport.close()
    return seen


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        pytest.param(Faults(drop=0.5), {"same", "RequestTimeoutError"}, id="drop"),
        pytest.param(Faults(refuse=0.5), {"same", "TransportError"}, id="refuse"),
        pytest.param(Faults(break_after=1), {"TransportError"}, id="break"),
        pytest.param(Faults(), {"same"}, id="none"),
        pytest.param(Faults(delay_s=0.002), {"same"}, id="delay"),
    ],
)
def test_faults_happen_and_repeat_with_their_seed(faults: Faults, expected: set[str]) -> None:
    first = virtual_time.run(outcomes(faults, seed=3), timeout_s=60)
    assert set(first) == expected
    assert virtual_time.run(outcomes(faults, seed=3), timeout_s=60) == first


def test_corruption_is_noticed_or_changes_numbers() -> None:
    seen = asyncio.run(outcomes(Faults(corrupt=1.0), seed=1, rounds=40))
    assert {"changed", ProtocolError.__name__} <= set(seen)


async def test_only_chosen_peers_are_faulty() -> None:
    transport = FaultyTransport(LocalTransport(handlers()), Faults(refuse=1.0), peers={"b"})
    await (await transport.open("a", "rpc_info", timeout_s=10.0)).close()
    with pytest.raises(TransportError, match="injected fault"):
        await transport.open("b", "rpc_info", timeout_s=10.0)
    await transport.close()


def test_chances_are_chances() -> None:
    with pytest.raises(ConfigError, match="drop must be a probability between 0 and 1, got 2"):
        Faults(drop=2)


async def test_a_silent_peer_times_out() -> None:
    transport = LocalTransport(handlers())
    channel = await transport.open("a", "rpc_forward", timeout_s=10.0)
    with pytest.raises(RequestTimeoutError, match=r"no message from a within 0\.02 s"):
        await channel.receive(timeout_s=0.02)
    await transport.close()
