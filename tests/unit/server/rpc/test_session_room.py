"""Memory of sessions: shares, first tokens, leases."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Sequence

import msgspec
import pytest
import torch
from fake_server import TOKEN_BYTES, FakeCache, FakeRunner, transport_to, until
from session_kit import OPEN, ask, playing, step_of

from swarm_plugins.block_io import CacheOp, SpanOutputs
from swarm_plugins.blocks.kv import KVCache, KVPool
from swarm_plugins.blocks.layout import BlockKV
from swarm_plugins.blocks.runner import StepInputs
from swarm_plugins.server import limits
from swarm_plugins.server.rpc.session_memory import room
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.cutting import RunLimits
from swarm_plugins.server.state.inbox import Inbox
from swarm_plugins.server.state.prefixes import PrefixStore
from swarm_plugins.server.state.sessions import Session
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.messages import (
    Failure,
    Message,
    SessionOpened,
    SessionStepResponse,
)


def holding(runner: FakeRunner, *, longer_than: int = -1) -> tuple[threading.Event, threading.Event]:
    """Holds steps of longer sessions; returns what is set once one has begun, and what lets them go on."""
    inside, go_on, run = threading.Event(), threading.Event(), runner.step

    def step(steps: Sequence[StepInputs]) -> list[SpanOutputs]:
        if steps[0].cache.length > longer_than:
            inside.set()
            go_on.wait(30.0)
        return run(steps)

    runner.step = step  # type: ignore[method-assign]
    return inside, go_on


async def test_share_of_the_kv_budget_is_kept(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    # 512 tokens in 4 blocks; one peer gets 358 of them, in pages of 64.
    service.kv_bytes = 512 * TOKEN_BYTES
    monkeypatch.setattr(limits, "MAX_KV_SHARE", 0.7)
    service.max_session_tokens = 200
    async with playing(service) as (channel, transport):
        other = await transport.open("server", "rpc_session", timeout_s=5)
        for one in (channel, other):
            assert isinstance(await ask(one, OPEN), SessionOpened)
        assert isinstance(await ask(channel, step_of(180, 0)), SessionStepResponse)
        answer = await ask(other, step_of(180, 0))
        assert isinstance(answer, Failure)
        assert answer.kind == "out_of_memory"
        assert (
            "take 12288 bytes, those of its address 12288 and all 12288 of 32768: there is no room for 12288 more"
            in answer.message
        )
        assert isinstance(await ask(other, step_of(128, 0)), SessionStepResponse)
        # A stranger finds room all the same.
        stranger = transport_to(service, "mallory")
        theirs = await stranger.open("server", "rpc_session", timeout_s=5)
        await ask(theirs, OPEN)
        assert isinstance(await ask(theirs, step_of(60, 0)), SessionStepResponse)
        await stranger.close()


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # Of 75000 bytes each row takes 8000 at any length, and 80 for each token of whole pages while it grows.
        pytest.param(BlockKV(1, 2, 1, 2, torch.float32, row_bytes=1000), [832, 0, 0], id="states beside keys"),
        pytest.param(BlockKV(0, 0, 0, 0, torch.float32, row_bytes=1000), [2000, 2000, 0], id="states only"),
        pytest.param(BlockKV(0, 0, 0, 0, torch.float32), [2000, 2000, 2000], id="nothing is kept"),
    ],
)
async def test_states_of_rows_count_in_the_share(
    layout: BlockKV, expected: list[int], service: Service, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.spec = dataclasses.replace(runner.spec, kv_layouts=dict.fromkeys(range(2, 6), layout))
    service.kv_bytes, service.max_session_tokens = 100_000, 2000
    monkeypatch.setattr(limits, "MAX_KV_SHARE", 0.75)
    async with playing(service) as (_, transport):
        found = []
        for rows in (1, 9, 10):
            channel = await transport.open("server", "rpc_session", timeout_s=5)
            opened = await ask(channel, msgspec.structs.replace(OPEN, batch_size=rows))
            assert isinstance(opened, SessionOpened)
            found.append(opened.max_tokens)
    assert found == expected


async def test_steps_at_the_same_time_keep_the_share_too(
    service: Service, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.kv_bytes = 512 * TOKEN_BYTES
    monkeypatch.setattr(limits, "MAX_KV_SHARE", 0.7)
    service.max_session_tokens = 200
    async with playing(service) as (channel, transport):
        other = await transport.open("server", "rpc_session", timeout_s=5)
        for one in (channel, other):
            await ask(one, OPEN)
        runner.gate = threading.Event()
        for one in (channel, other):
            await one.send(step_of(180, 0))
        refusal = await other.receive(timeout_s=5)
        assert isinstance(refusal, Failure)
        assert refusal.kind == "out_of_memory"
        runner.gate.set()
        assert isinstance(await channel.receive(timeout_s=5), SessionStepResponse)
        assert isinstance(await ask(other, step_of(128, 0)), SessionStepResponse)


async def test_many_identities_of_one_address_leave_room_for_others(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 32 pages of 64 tokens in each of 4 blocks; identities come until one gets no page.
    service.kv_bytes = 2048 * TOKEN_BYTES
    monkeypatch.setattr(limits, "MAX_KV_SHARE", 0.75)
    async with playing(service):

        async def hold(peer: str, num_tokens: int) -> Message:
            transports.append(transport_to(service, peer))
            theirs = await transports[-1].open("server", "rpc_session", timeout_s=5)
            await ask(theirs, OPEN)
            return await ask(theirs, step_of(num_tokens, 0))

        transports: list[LocalTransport] = []
        for number in range(40):
            service.points.met(f"sybil {number}", "/ip4/203.0.113.7/tcp/4001")
            answer = await hold(f"sybil {number}", 64)
            if isinstance(answer, Failure):
                break
        # As many as one address may hold: nine tenths.
        assert isinstance(answer, Failure)
        assert "take 0 bytes, those of its address 114688 and all 114688 of 131072" in answer.message
        service.points.met("honest", "/ip4/198.51.100.1/tcp/4001")
        assert isinstance(await hold("honest", 64), SessionStepResponse)
        for one in transports:
            await one.close()


async def test_wide_sessions_take_no_memory_before_their_first_tokens(service: Service) -> None:
    async with playing(service) as (channel, transport):
        others = [await transport.open("server", "rpc_session", timeout_s=5) for _ in range(2)]
        for one in (channel, *others):
            assert isinstance(await ask(one, msgspec.structs.replace(OPEN, batch_size=200)), SessionOpened)
        assert service.sessions.held_bytes() == 0


async def test_rows_change_their_order_only_where_there_is_room_to_move_them(service: Service) -> None:
    service.kv_bytes = 2 * 64 * TOKEN_BYTES
    async with playing(service) as (channel, _):
        await ask(channel, msgspec.structs.replace(OPEN, batch_size=2))
        await ask(channel, step_of(60, 0, batch_size=2))
        swap = CacheOp(kind="reorder", indices=(1, 0))
        refused = await ask(channel, step_of(1, 60, batch_size=2, ops=(swap,)))
        assert isinstance(refused, Failure)
        assert f"there is no room for {2 * 64 * TOKEN_BYTES // 4} more" in refused.message
        # Twice is as they were.
        assert isinstance(await ask(channel, step_of(1, 60, batch_size=2, ops=(swap, swap))), SessionStepResponse)


async def test_what_a_long_prompt_has_taken_counts_once_while_the_rest_runs(
    service: Service, runner: FakeRunner
) -> None:
    service.kv_bytes, service.max_session_tokens = 256 * TOKEN_BYTES, 200
    stranger = transport_to(service, "mallory")
    async with playing(service) as (channel, _):
        theirs = await stranger.open("server", "rpc_session", timeout_s=5)
        for one in (channel, theirs):
            await ask(one, OPEN)
        inside, go_on = holding(runner, longer_than=64)
        await channel.send(step_of(192, 0))
        await until(inside.is_set)
        # Two of its three pages are held, one is promised, and one is free.
        receiving = asyncio.ensure_future(ask(theirs, step_of(1, 0)))
        await until(lambda: service.scheduler.num_waiting == 2 or receiving.done())
        go_on.set()
        assert isinstance(await receiving, SessionStepResponse)
        assert isinstance(await channel.receive(timeout_s=5), SessionStepResponse)
        assert service.sessions.held_bytes() == 256 * TOKEN_BYTES
    await stranger.close()


async def test_a_session_gives_its_room_to_others_when_its_lease_is_over(
    service: Service, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with playing(service) as (channel, _):
        await ask(channel, OPEN)
        assert isinstance(await ask(channel, step_of(100, 0)), SessionStepResponse)
        stranger = transport_to(service, "mallory")
        theirs = await stranger.open("server", "rpc_session", timeout_s=5)
        await ask(theirs, OPEN)
        refusal = await ask(theirs, step_of(100, 0))
        assert isinstance(refusal, Failure)
        assert refusal.kind == "out_of_memory"
        monkeypatch.setattr(limits, "SESSION_LEASE_S", 0.2)
        await asyncio.sleep(0.3)
        assert isinstance(await ask(theirs, step_of(100, 0)), SessionStepResponse)
        assert [cache.length for cache in runner.open_caches] == [100]
        lost = await ask(channel, step_of(1, 100))
        assert isinstance(lost, Failure)
        assert lost.kind == "unknown_session"
        assert "had no step for 0.2 s and gave its room to others: open a new one and replay" in lost.message
        await stranger.close()
    assert runner.open_caches == []


async def test_a_fork_gets_no_more_than_it_has_taken_room_for(service: Service, runner: FakeRunner) -> None:
    """Forks of an empty session that waited behind its first step once got all its tokens, for nothing."""
    async with playing(service) as (channel, transport):
        opened = await ask(channel, OPEN)
        assert isinstance(opened, SessionOpened)
        fork = msgspec.structs.replace(OPEN, fork_of=opened.session)
        other = await transport.open("server", "rpc_session", timeout_s=5)
        inside, go_on = holding(runner)
        await channel.send(step_of(100, 0))
        await until(inside.is_set)
        await other.send(fork)
        await until(lambda: service.scheduler.num_waiting == 2)
        go_on.set()
        assert isinstance(await channel.receive(timeout_s=5), SessionStepResponse)
        refusal = await other.receive(timeout_s=5)
        assert isinstance(refusal, Failure)
        assert refusal.kind == "unknown_session"
        assert "from 0 to 4096 bytes: fork it between its steps" in refusal.message
        assert [cache.length for cache in runner.open_caches] == [100]


async def test_a_fork_takes_room_for_all_rows_that_it_gets(service: Service, runner: FakeRunner) -> None:
    """Forks behind a step that made more rows once got these for the room of one."""
    service.kv_bytes, service.sessions.max_per_peer = 2048 * TOKEN_BYTES, 4
    async with playing(service) as (channel, transport):
        opened = await ask(channel, OPEN)
        assert isinstance(opened, SessionOpened)
        assert isinstance(await ask(channel, step_of(10, 0)), SessionStepResponse)
        blocker, *others = [await transport.open("server", "rpc_session", timeout_s=5) for _ in range(3)]
        await ask(blocker, OPEN)
        inside, go_on = holding(runner)
        await blocker.send(step_of(1, 0))
        await until(inside.is_set)
        ops = (CacheOp(kind="crop", indices=(9,)), CacheOp(kind="repeat", indices=(8,)))
        await channel.send(step_of(1, 9, batch_size=8, ops=ops))
        await until(lambda: service.scheduler.num_waiting == 2)
        # The first fork runs before the step, the second behind it.
        for other in others:
            await other.send(msgspec.structs.replace(OPEN, fork_of=opened.session, batch_size=8))
        await until(lambda: service.scheduler.num_waiting + service.counts.refusals.total() == 4)
        go_on.set()
        for other in others:
            refusal = await other.receive(timeout_s=5)
            assert isinstance(refusal, Failure)
            assert "the session to fork has 1 rows, the request names 8: fork first" in refusal.message
        assert isinstance(await channel.receive(timeout_s=5), SessionStepResponse)
        assert sorted(cache.batch_size for cache in runner.open_caches) == [1, 8]


def test_room_of_an_admitted_step_is_not_taken_as_spare_room_of_others(service: Service) -> None:
    layouts = {block: BlockKV(2, 8, 2, 8, torch.float32) for block in range(8)}
    page_bytes = 64 * sum(layout.token_bytes for layout in layouts.values())
    pool = KVPool(100 * page_bytes)
    service = dataclasses.replace(service, kv_bytes=pool.budget_bytes, prefixes=PrefixStore(pool))

    def session(peer: str, num_tokens: int) -> Session:
        cache = KVCache(pool, layouts, range(8), 1, torch.device("cpu"))
        cache.reserve(num_tokens)
        cache.advance(num_tokens)
        service.sessions.add(one := Session(peer, "v", cache.blocks, cache, Inbox(peer)))
        return one

    others = [session(f"other {number}", 10 * 64) for number in range(4)]
    late = session("late", 0).cache
    with contextlib.ExitStack() as admitted:
        admitted.enter_context(room(service, "late", late.growth_bytes(1, 44 * 64, 44 * 64)))
        for one in others:
            admitted.enter_context(room(service, one.peer, one.cache.growth_bytes(1, 10 * 64 + 1, 1), one))
            one.cache.reserve(1)
            one.cache.advance(1)
        late.reserve(44 * 64)
    # With no such step, there is plenty for all.
    late.close()
    others[0].cache.advance(63)
    others[0].cache.reserve(1)
    assert others[0].cache.capacity > 12 * 64


async def test_the_fork_of_many_short_rows_takes_room_for_their_pages(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.kv_bytes = 3 * 64 * 2 * TOKEN_BYTES
    rows = msgspec.structs.replace(OPEN, batch_size=2)
    async with playing(service) as (channel, transport):
        opened = await ask(channel, rows)
        assert isinstance(opened, SessionOpened)
        assert isinstance(await ask(channel, step_of(1, 0, batch_size=2)), SessionStepResponse)
        asked, growing = list[int](), service.sessions.growing

        def noted(peer: str, amount: int, session: Session | None) -> contextlib.AbstractContextManager[None]:
            asked.append(amount)
            return growing(peer, amount, session)

        monkeypatch.setattr(service.sessions, "growing", noted)
        other = await transport.open("server", "rpc_session", timeout_s=5)
        assert isinstance(await ask(other, msgspec.structs.replace(rows, fork_of=opened.session)), SessionOpened)
        # A page of 64 tokens for each row, in each of 4 blocks.
        assert asked == [2 * 64 * TOKEN_BYTES]


@pytest.mark.parametrize("last", [0, 79])
async def test_tokens_that_must_run_at_once_take_bounded_memory(
    service: Service, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """Padding is seen in the first step only: one padded token at the end of a prompt made attention's whole mask."""
    monkeypatch.setattr(FakeCache, "has_states", True)
    service.run_limits = RunLimits(run_bytes=50_000)
    mask = torch.ones(1, 80, dtype=torch.bool)
    mask[0, last] = False
    async with playing(service) as (channel, _):
        await ask(channel, OPEN)
        answer = await ask(channel, step_of(80, 0, attention_mask=mask))
        if last:
            assert isinstance(answer, Failure)
            assert answer.kind == "out_of_memory"
            assert "the first 80 new tokens of 1 rows have to run at once" in answer.message
            assert "take about 75520 bytes, the limit is 50000: send fewer rows" in answer.message
        else:
            assert isinstance(answer, SessionStepResponse)


async def test_padding_behind_cached_tokens_is_refused_before_it_joins_others(
    service: Service, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks with states of fixed size failed there, and all steps in the same forward ran again, one by one."""
    monkeypatch.setattr(FakeCache, "has_states", True)
    async with playing(service) as (channel, _):
        await ask(channel, OPEN)
        padded = torch.tensor([[True, False]])
        assert isinstance(await ask(channel, step_of(2, 0, attention_mask=padded)), SessionStepResponse)
        num_packs = len(runner.packs)
        refused = await ask(channel, step_of(1, 2, attention_mask=torch.tensor([[True, True, False]])))
        assert isinstance(refused, Failure)
        assert "padding among new tokens that follow cached ones" in refused.message
        assert len(runner.packs) == num_packs
        masked = torch.tensor([[True, False, True]])
        assert isinstance(await ask(channel, step_of(1, 2, attention_mask=masked)), SessionStepResponse)
