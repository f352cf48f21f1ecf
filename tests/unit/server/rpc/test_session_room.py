"""Memory of sessions: shares, first tokens, leases."""

from __future__ import annotations

import asyncio

import msgspec
from fake_server import FakeRunner, transport_to
from session_kit import OPEN, ask, limits_with, play, step_of

from swarm_plugins.server.service import Service
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import (
    Failure,
    SessionOpened,
    SessionStepResponse,
)


def test_share_of_the_kv_budget_is_kept(service: Service) -> None:
    # 512 tokens in 4 blocks; one peer gets 358 of them, in pages of 64.
    service.kv_tokens = 512
    service.limits = limits_with(service, max_peer_kv_share=0.7, max_session_tokens=200)

    async def scene(channel: Channel, transport: LocalTransport) -> None:
        other = await transport.open("server", "rpc_session", timeout_s=5)
        for one in (channel, other):
            assert isinstance(await ask(one, OPEN), SessionOpened)
        assert isinstance(await ask(channel, step_of(180, 0)), SessionStepResponse)
        answer = await ask(other, step_of(180, 0))
        assert isinstance(answer, Failure)
        assert answer.kind == "out_of_memory"
        assert "hold 768 tokens x blocks and all hold 768 of 2048: there is no room for 768 more" in answer.message
        assert isinstance(await ask(other, step_of(128, 0)), SessionStepResponse)
        # A stranger finds room all the same.
        stranger = transport_to(service, "mallory")
        theirs = await stranger.open("server", "rpc_session", timeout_s=5)
        await ask(theirs, OPEN)
        assert isinstance(await ask(theirs, step_of(60, 0)), SessionStepResponse)
        await stranger.close()

    play(service, scene)


def test_wide_sessions_take_no_memory_before_their_first_tokens(service: Service) -> None:
    async def scene(channel: Channel, transport: LocalTransport) -> None:
        others = [await transport.open("server", "rpc_session", timeout_s=5) for _ in range(2)]
        for one in (channel, *others):
            assert isinstance(await ask(one, msgspec.structs.replace(OPEN, batch_size=200)), SessionOpened)
        assert service.sessions.held_tokens() == 0

    play(service, scene)


def test_a_session_gives_its_room_to_others_when_its_lease_is_over(service: Service, runner: FakeRunner) -> None:
    service.limits = limits_with(service, session_lease_s=0.2)

    async def scene(channel: Channel, transport: LocalTransport) -> None:
        await ask(channel, OPEN)
        assert isinstance(await ask(channel, step_of(100, 0)), SessionStepResponse)
        stranger = transport_to(service, "mallory")
        theirs = await stranger.open("server", "rpc_session", timeout_s=5)
        await ask(theirs, OPEN)
        refusal = await ask(theirs, step_of(100, 0))
        assert isinstance(refusal, Failure)
        assert refusal.kind == "out_of_memory"
        await asyncio.sleep(0.3)
        assert isinstance(await ask(theirs, step_of(100, 0)), SessionStepResponse)
        assert [cache.length for cache in runner.open_caches] == [100]
        lost = await ask(channel, step_of(1, 100))
        assert isinstance(lost, Failure)
        assert lost.kind == "unknown_session"
        assert "had no step for 0.2 s and gave its room to others: open a new one and replay" in lost.message
        await stranger.close()

    play(service, scene)
    assert runner.open_caches == []
