"""A session that moves: the server that failed is left out, and nobody else; queued changes are never lost."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import msgspec
import pytest
import torch
from client_kit import in_swarm

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec
from swarm_plugins.block_io import AdapterUse, CacheOp, LoadedAdapter, SpanInputs, SpanOutputs
from swarm_plugins.book import judging
from swarm_plugins.book.record import Failed, Forgiven
from swarm_plugins.client.calls.retries import ChainRetries
from swarm_plugins.client.servers import Servers
from swarm_plugins.client.sessions.history import History
from swarm_plugins.client.sessions.pipe import Pipe
from swarm_plugins.client.sessions.replacing import faster
from swarm_plugins.client.sessions.session import ClientSession
from swarm_plugins.client.sessions.span import SpanSession
from swarm_plugins.errors import CapacityError, MissingBlocksError, TransportError, UnsupportedError
from swarm_plugins.routing import SpanChoice
from swarm_plugins.routing.chain import Alternative
from swarm_plugins.testing.transports import LocalChannel
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import (
    AdapterStored,
    AdapterUpload,
    Codec,
    Failure,
    FailureKind,
    Message,
    SessionOpen,
    SessionOpened,
    SessionStep,
    SessionStepResponse,
)


class Adder:
    """A server whose blocks add one to what they get, until it breaks."""

    def __init__(self) -> None:
        self.is_broken = False
        self.opened: list[SessionOpen] = []
        self.steps: list[SessionStep] = []

    def __call__(self, message: Message) -> Message:
        if self.is_broken:
            return Failure(kind="internal", message="broken")
        if isinstance(message, SessionOpen):
            self.opened.append(message)
            return SessionOpened(session="s", max_tokens=1000)
        if isinstance(message, AdapterUpload):
            return AdapterStored(digest=message.digest)
        assert isinstance(message, SessionStep)
        self.steps.append(message)
        return SessionStepResponse(hidden=message.hidden + 1)


def new_tokens(count: int = 1) -> SpanInputs:
    return SpanInputs(blocks=range(2), hidden=torch.zeros(1, count, 4))


@pytest.mark.parametrize("faulty", ["b", "c"])
async def test_only_the_server_that_fails_in_a_replay_is_left_out(faulty: str) -> None:
    servers = {name: Adder() for name in "abc"}
    spans = {"a": (0, 2), "b": (0, 1), "c": (1, 2)}
    answers = {name: (spans[name], servers[name]) for name in "abc"}
    async with in_swarm(answers, num_blocks=2, max_retries=2) as (peers, view):
        await view.refresh(force=False)
        view.peers.book.observe("b", Failed(""))
        session = ClientSession(Servers(peers, view), blocks=range(2))
        await session.step(new_tokens(3))
        view.peers.book.observe("b", Forgiven())
        servers["a"].is_broken = servers[faulty].is_broken = True
        with pytest.raises(MissingBlocksError):
            await session.step(new_tokens())
        assert sorted(view.banned()) == ["a", faulty]
        await session.close()


async def test_changes_of_the_prefix_outlive_a_failed_first_step() -> None:
    server = Adder()
    async with in_swarm({"a": ((0, 1), server)}, num_blocks=1) as (peers, view):
        await view.refresh(force=False)
        keys = torch.arange(5.0)[None, None, :, None]
        session = ClientSession(Servers(peers, view), blocks=range(1), prefix=(keys, keys))
        server.is_broken = True
        with pytest.raises(MissingBlocksError):
            await session.step(new_tokens(), [CacheOp(kind="crop", indices=(3,))])
        server.is_broken = False
        await session.step(new_tokens())
        await session.close()
    assert [tensor.flatten().tolist() for tensor in server.opened[0].prefix] == [[0.0, 1.0, 2.0]] * 2


async def test_an_interrupted_copy_leaves_no_stream_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Channel] = []
    closed: list[Channel] = []
    async with in_swarm({"a": ((0, 1), Adder()), "b": ((1, 2), Adder())}, num_blocks=2) as (peers, view):
        session = ClientSession(Servers(peers, view), blocks=range(2))
        await session.step(new_tokens(3))
        open_one = peers.open

        async def open_or_be_interrupted(peer: str, rpc: str) -> Channel:
            if opened:
                raise asyncio.CancelledError
            channel = await open_one(peer, rpc)
            close = channel.close

            async def close_noted() -> None:
                closed.append(channel)
                await close()

            monkeypatch.setattr(channel, "close", close_noted)
            opened.append(channel)
            return channel

        monkeypatch.setattr(peers, "open", open_or_be_interrupted)
        with pytest.raises(asyncio.CancelledError):
            await session.fork()
        assert len(opened) == 1
        assert closed == opened
        await session.close()


async def test_a_step_that_outlives_the_close_of_its_session_leaves_no_stream_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, begun = Pipe.run, asyncio.Event()
    spans: list[SpanSession] = []

    async def run_stubbornly(pipe: Pipe) -> SpanOutputs:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(20.0)
            await run(pipe)
            spans.extend(pipe.spans)
            raise
        raise AssertionError

    monkeypatch.setattr(Pipe, "run", run_stubbornly)
    async with in_swarm({"a": ((0, 1), Adder())}, num_blocks=1) as (peers, view):
        session = ClientSession(Servers(peers, view), blocks=range(1))
        step = asyncio.create_task(session.step(new_tokens()))
        await begun.wait()
        await session.close()
        assert not step.done()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert [span.channel for span in spans] == [None]
        assert session.peers == ()


async def test_chunks_whose_routers_differ_are_run_again_elsewhere() -> None:
    class Router(Adder):
        def __init__(self, widths: tuple[int, ...]) -> None:
            super().__init__()
            self.widths = itertools.cycle(widths)

        def __call__(self, message: Message) -> Message:
            answer = super().__call__(message)
            if not (isinstance(answer, SessionStepResponse) and getattr(message, "collect_router", False)):
                return answer
            logits = torch.zeros(answer.hidden.shape[1], next(self.widths))
            return msgspec.structs.replace(answer, router_logits=(logits,), router_blocks=(0,))

    liar, honest = Router((4, 8)), Router((4,))
    async with in_swarm({"liar": ((0, 1), liar), "honest": ((0, 1), honest)}, num_blocks=1) as (peers, view):
        await view.refresh(force=False)
        for peer, info in view.infos.items():
            view.peers.book.kept(peer).info = msgspec.structs.replace(info, max_batch_tokens=300)
        view.peers.book.observe("honest", Failed(""))
        session = ClientSession(Servers(peers, view), blocks=range(1))
        await session.step(new_tokens())
        view.peers.book.observe("honest", Forgiven())
        outputs = await session.step(replace(new_tokens(600), collect_router=True))
        assert outputs.router_logits[0].shape == (600, 4)
        assert view.banned() == ["liar"]
        await session.close()


async def test_a_prompt_that_the_server_said_it_cannot_hold_is_not_sent() -> None:
    steps: list[Message] = []

    def small(message: Message) -> Message:
        if isinstance(message, SessionOpen):
            return SessionOpened(session="s", max_tokens=9)
        steps.append(message)
        assert isinstance(message, SessionStep)
        return SessionStepResponse(hidden=message.hidden + 1)

    async with in_swarm({"a": ((0, 1), small)}, num_blocks=1) as (peers, view):
        session = ClientSession(Servers(peers, view), blocks=range(1))
        await session.step(new_tokens(6))
        with pytest.raises(CapacityError, match=r"a holds 9 tokens per row at most .* 10 are needed"):
            await session.step(new_tokens(4))
        assert len(steps) == 1
        await session.close()


@pytest.mark.parametrize("message", [SessionOpen, AdapterUpload])
async def test_a_server_that_hangs_is_not_waited_for_longer_than_it_used_to_take(message: type[Message]) -> None:
    async with in_swarm({"a": ((0, 1), Adder())}, num_blocks=1) as (peers, view):
        weight = torch.zeros(2, 2)
        await peers.upload("a", [LoadedAdapter(digest="d", spec=AdapterSpec(modules=()), tensors=(weight,))])
        session = ClientSession(Servers(peers, view), blocks=range(1))
        await session.step(new_tokens(6))
        rpc = "open session" if message is SessionOpen else "rpc_adapter"
        assert judging.timeout_s(peers.book["a"], rpc, 1) < peers.book.rules.longest_s
        await session.close()


async def test_a_replay_sends_what_was_sent_though_its_buffers_hold_something_else_now() -> None:
    servers = {name: Adder() for name in "ab"}
    async with in_swarm({name: ((0, 2), server) for name, server in servers.items()}, num_blocks=2) as (peers, view):
        prefix = [torch.ones(1, 1, 1, 2) for _ in range(4)]
        session = ClientSession(Servers(peers, view), blocks=range(2), prefix=prefix)
        hidden, positions, ids = torch.ones(1, 1, 4), torch.ones(1, 1).long(), torch.ones(1, 1).long()
        mask = torch.ones(1, 2, dtype=torch.bool)
        inputs = SpanInputs(blocks=range(2), hidden=hidden, position_ids=positions, attention_mask=mask, token_ids=ids)
        await session.step(inputs)
        [lost] = session.peers
        await peers.transport.kill(lost)  # type: ignore[attr-defined]
        for buffer in (hidden, positions, mask, ids, *prefix):
            buffer.zero_()
        await session.step(replace(inputs, attention_mask=None))
        [other] = [server for name, server in servers.items() if name != lost]
        [opened], again = other.opened, other.steps[0]
        for tensor in (again.hidden, again.position_ids, again.attention_mask, again.token_ids, *opened.prefix):
            assert isinstance(tensor, torch.Tensor)
            assert tensor.all()
        await session.close()


@pytest.mark.parametrize("is_reset", [False, True], ids=["the-same-cache", "a-new-cache"])
async def test_a_session_is_not_replayed_with_adapters_that_have_changed(is_reset: bool) -> None:
    weights = (torch.zeros(2, 4), torch.zeros(6, 2))
    module = AdapterModule(block=0, module="self_attn.q_proj", kind="lora", shapes=((2, 4), (6, 2)), scaling=1.0)
    use = AdapterUse(adapters=(LoadedAdapter(spec=AdapterSpec(modules=(module,)), tensors=weights),))
    inputs = replace(new_tokens(), adapters=use)
    async with in_swarm({name: ((0, 2), Adder()) for name in "ab"}, num_blocks=2) as (peers, view):
        session = ClientSession(Servers(peers, view), blocks=range(2))
        await session.step(inputs)
        weights[0].add_(1.0)
        await session.step(inputs, [CacheOp(kind="reset", indices=())] if is_reset else [])
        await peers.transport.kill(*session.peers)  # type: ignore[attr-defined]
        if is_reset:
            await session.step(inputs)
        else:
            with pytest.raises(UnsupportedError, match=r"one of its adapters has changed .* start with a new cache"):
                await session.step(inputs)
        await session.close()


async def test_nothing_is_sent_in_the_midst_of_a_chunk_that_the_server_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Forgetful(Adder):
        def __call__(self, message: Message) -> Message:
            if isinstance(message, SessionStep) and not self.steps:
                self.steps.append(message)
                return Failure(kind="unknown_adapter", message="upload it")
            return super().__call__(message)

    inputs = SpanInputs(blocks=range(1), hidden=torch.zeros(1, 4, 4))
    async with in_swarm({"a": ((0, 1), Forgetful())}, num_blocks=1) as (peers, view):
        await view.refresh(force=False)
        servers = Servers(peers, view)
        span = SpanSession(servers, "a", range(1), History())
        await span.open(1)
        first, chunks = span.channel, inputs.cut_tokens(2, 0)
        assert first is not None
        send, sent = first.send, list[Message]()

        async def send_only_one(message: Message, *, codec: Codec = "none") -> None:
            sent.append(message)
            if len(sent) > len(chunks):
                raise TransportError("it is in the midst of another message")
            await (send(message, codec=codec) if len(sent) == 1 else asyncio.Event().wait())

        monkeypatch.setattr(first, "send", send_only_one)
        pipe = Pipe(servers, [span], inputs, 0, ChainRetries(view))
        pipe._prepare(chunks)
        outputs = await pipe._run_chunks(chunks)
        assert outputs.hidden.eq(1).all()
        assert len(sent) == len(chunks)
        assert span.channel is not first
        assert not view.banned()
        await span.close()


async def test_a_server_is_forgiven_after_a_good_step() -> None:
    async with in_swarm({"a": ((0, 2), Adder())}, num_blocks=2) as (peers, view):
        session = ClientSession(Servers(peers, view), blocks=range(2))
        await session.step(new_tokens(3))
        view.ban("a", TransportError("a blip"))
        await view.refresh(force=True)
        assert judging.is_banned(peers.book, "a")
        await session.step(new_tokens())
        assert peers.book["a"].num_strikes == 0
        await session.close()


async def test_streams_to_all_servers_that_end_at_once_end_no_session() -> None:
    num_blocks = 5
    answers = {f"p{block}": ((block, block + 1), Adder()) for block in range(num_blocks)}
    async with in_swarm(answers, num_blocks=num_blocks, max_retries=1) as (peers, view):
        peers.book.rules = replace(peers.book.rules, first_pause_s=0.0)
        session = ClientSession(Servers(peers, view), blocks=range(num_blocks))
        inputs = replace(new_tokens(), blocks=range(num_blocks))
        await session.step(inputs)
        for span in session._spans:
            assert isinstance(span.channel, LocalChannel)
            await span.channel.finish(is_broken=True)
        assert (await session.step(inputs)).hidden.mean() == num_blocks
        await session.close()


@pytest.mark.parametrize(
    ("kind", "is_banned"),
    [
        ("out_of_memory", False),
        ("overloaded", False),
        ("wrong_span", False),
        ("bad_request", False),
        ("internal", True),
    ],
)
async def test_a_faster_server_that_declines_a_session_is_left_out_only_for_a_failure(
    kind: FailureKind, is_banned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decline(message: Message) -> Message:
        return Failure(kind=kind, message="no")

    async with in_swarm({"a": ((0, 2), Adder()), "b": ((0, 2), decline)}, num_blocks=2) as (peers, view):
        await view.refresh(force=False)
        peers.book.observe("b", Failed(""))
        session = ClientSession(Servers(peers, view), blocks=range(2))
        await session.step(new_tokens(3))
        peers.book.observe("b", Forgiven())
        [current] = session._spans
        monkeypatch.setattr(view, "alternative", lambda *_, **__: Alternative([SpanChoice("b", 0, 2)], 0.0, 0.0))
        monkeypatch.setattr(current.times, "is_move_worth", lambda *_: True)
        assert await faster(session.servers, current, session._spans, 1) is None
        assert judging.is_banned(peers.book, "b") == is_banned
        await session.close()
