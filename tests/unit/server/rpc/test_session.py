from __future__ import annotations

import asyncio
import dataclasses

import msgspec
import pytest
import torch
from fake_server import TOKEN_BYTES, VERSION, WIDTH, FakeRunner, transport_to
from session_kit import ADDED, OPEN, ask, playing, step_of

from swarm_plugins.block_io import CacheOp
from swarm_plugins.server import limits
from swarm_plugins.server.service import Service
from swarm_plugins.transport.messages import (
    Failure,
    ForwardRequest,
    Message,
    SessionOpened,
    SessionStep,
    SessionStepResponse,
)


async def test_prefill_and_decode_share_one_session(service: Service, runner: FakeRunner) -> None:
    async with playing(service) as (channel, _):
        opened = await ask(channel, OPEN)
        assert isinstance(opened, SessionOpened)
        assert opened.max_tokens == 100
        first = await ask(channel, step_of(5, 0))
        second = await ask(channel, step_of(1, 5, value=2.0, collect_hidden=True, collect_router=True))
        assert isinstance(first, SessionStepResponse)
        assert isinstance(second, SessionStepResponse)
        assert first.hidden.shape == (1, 5, WIDTH)
        assert float(second.hidden[0, 0, 0]) == 2.0 + ADDED
        assert len(second.hidden_states) == len(second.router_logits) == 1
        assert second.router_blocks == (2,)
        assert runner.open_caches[0].length == 6
    assert runner.open_caches == []
    assert len(service.sessions) == 0


async def test_a_prompt_stays_whole_where_its_end_decides_how_all_is_encoded(
    service: Service, runner: FakeRunner
) -> None:
    runner.spec = dataclasses.replace(FakeRunner.spec, whole_beyond=75)
    async with playing(service) as (channel, _):
        await ask(channel, OPEN)
        await ask(channel, step_of(70, 0))
        await ask(channel, step_of(10, 70))
        await ask(channel, step_of(70, 0, ops=(CacheOp(kind="reset"),)))
    assert runner.packs == [[(1, 64)], [(1, 6)], [(1, 10)], [(1, 64)], [(1, 6)]]
    runner.packs.clear()
    async with playing(service) as (channel, _):
        await ask(channel, OPEN)
        await ask(channel, step_of(80, 0))
    assert runner.packs == [[(1, 76)], [(1, 4)]]


async def test_sub_span_may_hold_longer_sessions(service: Service) -> None:
    async with playing(service) as (channel, _):
        # 200 tokens fit in 4 blocks: 3 rows in all 4 blocks get a page each, in 1 block they would get two.
        opened = await ask(channel, msgspec.structs.replace(OPEN, batch_size=3))
        assert isinstance(opened, SessionOpened)
        assert opened.max_tokens == 64


@pytest.mark.parametrize(
    ("message", "kind", "words"),
    [
        pytest.param(step_of(1, 0), "unknown_session", "send SessionOpen first", id="step-before-open"),
        pytest.param(
            msgspec.structs.replace(OPEN, version="other@main"), "wrong_version", "serves tiny@", id="other-version"
        ),
        pytest.param(
            msgspec.structs.replace(OPEN, start=0), "wrong_span", r"blocks 0:6 .* holds 2:6", id="blocks-elsewhere"
        ),
        pytest.param(
            msgspec.structs.replace(OPEN, end=9),
            "bad_request",
            r"blocks 2:9: the model has blocks 0:8",
            id="no-such-block",
        ),
        pytest.param(msgspec.structs.replace(OPEN, end=2), "bad_request", "blocks 2:2", id="empty-span"),
        pytest.param(
            msgspec.structs.replace(OPEN, batch_size=257), "bad_request", "257, expected 1 to 256", id="wide-batch"
        ),
        pytest.param(
            msgspec.structs.replace(OPEN, fork_of="guess"), "unknown_session", "'guess' is not open", id="unknown-fork"
        ),
        pytest.param(
            msgspec.structs.replace(OPEN, prefix=(torch.zeros(1, 1, 2, 2),)),
            "bad_request",
            "1 tensors, expected 2",
            id="half-a-prefix",
        ),
        pytest.param(
            msgspec.structs.replace(OPEN, prefix=tuple(torch.zeros(1, 1, 101, 2) for _ in range(8))),
            "bad_request",
            "101 tokens per row, this server allows 100",
            id="long-prefix",
        ),
        pytest.param(
            ForwardRequest(version=VERSION, start=2, end=6, hidden=torch.zeros(1, 1, WIDTH)),
            "bad_request",
            "ForwardRequest, expected SessionOpen or SessionStep",
            id="other-message",
        ),
    ],
)
async def test_wrong_opening_is_refused_and_the_stream_lives_on(
    service: Service, message: Message, kind: str, words: str
) -> None:
    async with playing(service) as (channel, _):
        answer = await ask(channel, message)
        assert isinstance(answer, Failure)
        assert answer.kind == kind
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(answer.message)
        assert isinstance(await ask(channel, OPEN), SessionOpened)
        assert isinstance(await ask(channel, step_of(1, 0)), SessionStepResponse)


@pytest.mark.parametrize(
    ("step", "kind", "words"),
    [
        pytest.param(
            step_of(1, 3), "bad_request", "client counts 3 cached tokens, this session holds 4", id="out-of-sync"
        ),
        pytest.param(step_of(97, 4), "bad_request", "101 tokens per row, this server allows 100", id="too-long"),
        pytest.param(step_of(1, 4, batch_size=2), "bad_request", "hidden has 2 rows, the session has 1", id="rows"),
        pytest.param(
            SessionStep(hidden=torch.zeros(1, 1, 5), cached_tokens=4),
            "bad_request",
            r"\[1, 1, 5\].*length, 4\]",
            id="width",
        ),
        pytest.param(step_of(1, 4, value=float("nan")), "not_finite", "NaN or infinity", id="nan"),
        pytest.param(
            step_of(1, 4, attention_mask=torch.ones(1, 4, dtype=torch.bool)),
            "bad_request",
            r"attention_mask has shape \[1, 4\], expected \[1, 5\]",
            id="mask",
        ),
        pytest.param(
            step_of(1, 4, position_ids=torch.tensor([[-1]])), "bad_request", "position_ids run from -1", id="positions"
        ),
        pytest.param(step_of(1, 4, adapters=("ab",)), "unknown_adapter", "'ab' is not held here", id="adapter"),
        pytest.param(
            step_of(1, 4, adapter_rows=(0,)),
            "bad_request",
            "adapter 0 from token 0 on, expected -1 .none. to -1",
            id="adapter-rows",
        ),
        pytest.param(
            step_of(1, 5, ops=(CacheOp(kind="crop", indices=(5,)),)),
            "bad_request",
            "cannot crop a cache of 4 tokens to 5",
            id="crop",
        ),
        pytest.param(
            step_of(1, 4, ops=(CacheOp(kind="reorder", indices=(1,)),)),
            "bad_request",
            "reorder names row 1, rows 0 to 0 exist",
            id="reorder",
        ),
        pytest.param(
            step_of(1, 4, ops=(CacheOp(kind="repeat", indices=(10**9,)),)),
            "bad_request",
            "cache operation repeat makes 1000000000 rows, the limit is 256",
            id="repeat",
        ),
        pytest.param(OPEN, "bad_request", "has a session already", id="second-opening"),
        pytest.param(step_of(1, 4, value=666.0), "internal", "its log says more", id="fault-of-the-server"),
    ],
)
async def test_wrong_step_is_refused_and_the_session_lives_on(
    service: Service, runner: FakeRunner, step: Message, kind: str, words: str
) -> None:
    async with playing(service) as (channel, _):
        await ask(channel, OPEN)
        await ask(channel, step_of(4, 0))
        answer = await ask(channel, step)
        assert isinstance(answer, Failure)
        assert answer.kind == kind
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(answer.message)
        assert "/home" not in answer.message
        assert runner.open_caches[0].length == 4
        assert isinstance(await ask(channel, step_of(1, 4)), SessionStepResponse)


async def test_full_budget_is_out_of_memory_and_leaves_the_session(service: Service, runner: FakeRunner) -> None:
    runner.max_cached = 10
    async with playing(service) as (channel, _):
        await ask(channel, OPEN)
        await ask(channel, step_of(8, 0))
        answer = await ask(channel, step_of(3, 8))
        assert isinstance(answer, Failure)
        assert answer.kind == "out_of_memory"
        assert "8 used, 3 asked, limit 10" in answer.message
        assert isinstance(await ask(channel, step_of(2, 8)), SessionStepResponse)


async def test_batch_that_the_budget_cannot_hold_is_out_of_memory(service: Service) -> None:
    service.kv_bytes = 256 * TOKEN_BYTES
    async with playing(service) as (channel, _):
        await ask(channel, msgspec.structs.replace(OPEN, batch_size=4))
        answer = await ask(channel, step_of(65, 0, batch_size=4))
        assert isinstance(answer, Failure)
        assert answer.kind == "out_of_memory"
        assert "65 tokens in each of 4 rows, the KV budget of this server has room for 64 in each" in answer.message
        assert isinstance(await ask(channel, step_of(64, 0, batch_size=4)), SessionStepResponse)


async def test_operations_take_effect_before_the_step(service: Service, runner: FakeRunner) -> None:
    async with playing(service) as (channel, _):
        await ask(channel, OPEN)
        await ask(channel, step_of(8, 0))
        ops = (CacheOp(kind="repeat", indices=(3,)), CacheOp(kind="crop", indices=(6,)))
        ops = (*ops, CacheOp(kind="select", indices=(0, 2)))
        answer = await ask(channel, step_of(2, 6, batch_size=2, ops=ops))
        assert isinstance(answer, SessionStepResponse)
        assert (runner.open_caches[0].batch_size, runner.open_caches[0].length) == (2, 8)
        answer = await ask(channel, step_of(1, 0, batch_size=2, ops=(CacheOp(kind="reset"),)))
        assert isinstance(answer, SessionStepResponse)
        assert runner.open_caches[0].length == 1


async def test_fork_copies_the_cache_of_the_same_peer_only(service: Service, runner: FakeRunner) -> None:
    service.kv_bytes = 400 * TOKEN_BYTES
    async with playing(service) as (channel, transport):
        opened = await ask(channel, OPEN)
        assert isinstance(opened, SessionOpened)
        await ask(channel, step_of(4, 0))
        fork = msgspec.structs.replace(OPEN, fork_of=opened.session)
        other = await transport.open("server", "rpc_session", timeout_s=5)
        copied = await ask(other, fork)
        assert isinstance(copied, SessionOpened)
        assert copied.session != opened.session
        assert isinstance(await ask(other, step_of(1, 4)), SessionStepResponse)
        assert sorted(cache.length for cache in runner.open_caches) == [4, 5]

        stranger = transport_to(service, "mallory")
        theirs = await stranger.open("server", "rpc_session", timeout_s=5)
        answer = await ask(theirs, fork)
        assert isinstance(answer, Failure)
        assert answer.kind == "unknown_session"
        wrong = await ask(theirs, msgspec.structs.replace(fork, prefix=(torch.zeros(1, 1, 1, 2),) * 8))
        assert isinstance(wrong, Failure)
        await stranger.close()

        third = await transport.open("server", "rpc_session", timeout_s=5)
        answer = await ask(third, msgspec.structs.replace(fork, batch_size=2))
        assert isinstance(answer, Failure)
        assert "has 1 rows, the request names 2" in answer.message


async def test_peer_may_hold_so_many_sessions(service: Service) -> None:
    async with playing(service) as (channel, transport):
        await ask(channel, OPEN)
        others = [await transport.open("server", "rpc_session", timeout_s=5) for _ in range(3)]
        answers = [await ask(other, OPEN) for other in others]
        assert [type(answer) for answer in answers] == [SessionOpened, SessionOpened, Failure]
        assert isinstance(answers[2], Failure)
        assert answers[2].kind == "overloaded"
        assert "3 sessions of this client are open here, the limit is 3" in answers[2].message
        await channel.close()
        async with asyncio.timeout(5):
            while not isinstance(await ask(others[2], OPEN), SessionOpened):
                await asyncio.sleep(0.01)


async def test_silent_session_is_closed(service: Service, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SESSION_LEASE_S", 0.1)
    monkeypatch.setattr(limits, "IDLE_SESSION_S", 0.1)
    async with playing(service) as (channel, _):
        await ask(channel, OPEN)
        assert await channel.receive(timeout_s=5) is None
    assert runner.open_caches == []


async def test_broken_line_in_mid_step_closes_the_session(service: Service, runner: FakeRunner) -> None:
    runner.block_s = 0.2
    async with playing(service) as (channel, transport):
        await ask(channel, OPEN)
        await channel.send(step_of(1, 0))
        await asyncio.sleep(0.05)
        await transport.close()
    assert runner.open_caches == []
    assert service.scheduler.num_waiting == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
async def test_answer_has_the_clients_dtype(service: Service, dtype: torch.dtype) -> None:
    async with playing(service) as (channel, _):
        await ask(channel, OPEN)
        answer = await ask(channel, SessionStep(hidden=torch.ones(1, 2, WIDTH, dtype=dtype), cached_tokens=0))
        assert isinstance(answer, SessionStepResponse)
        assert answer.hidden.dtype == dtype
        assert float(answer.hidden[0, 0, 0]) == 1 + ADDED


async def test_output_that_overflows_the_clients_dtype_is_refused(service: Service) -> None:
    async with playing(service) as (channel, _):
        await ask(channel, OPEN)
        answer = await ask(channel, SessionStep(hidden=torch.full((1, 1, WIDTH), 65504.0).half(), cached_tokens=0))
        assert isinstance(answer, Failure)  # 65504 + 18 rounds to infinity in float16
        assert answer.kind == "not_finite_output"
