"""A chain's backward: repaired when graphs or servers are lost, never for ever, the same when it is asked twice."""

from __future__ import annotations

import asyncio
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from client_kit import in_swarm

from swarm_plugins.block_io import SpanInputs, SpanOutputs
from swarm_plugins.book import judging
from swarm_plugins.client.calls.pushing import Told
from swarm_plugins.client.discovery.view import SwarmView
from swarm_plugins.client.peers import Peers
from swarm_plugins.client.servers import Servers
from swarm_plugins.client.training import chain as training
from swarm_plugins.client.training.batch import BatchCall
from swarm_plugins.errors import MissingBlocksError
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    Failure,
    ForwardRequest,
    ForwardResponse,
    Message,
)

GONE = Failure(kind="unknown_ticket", message="gone")


class Doubler:
    """A server whose blocks double what they get; it keeps graphs until it is told to forget them."""

    def __init__(self) -> None:
        self.tickets: set[str] = set()
        self.num_issued = 0
        self.backwards: list[BackwardRequest] = []
        self.is_forgetful = False

    def __call__(self, message: Message) -> Message:
        if isinstance(message, ForwardRequest):
            ticket = f"{self.num_issued}" if message.keep else None
            self.num_issued += 1
            self.tickets.update({ticket} if ticket else ())
            return ForwardResponse(hidden=message.hidden * 2, ticket=ticket)
        assert isinstance(message, BackwardRequest)
        self.backwards.append(message)
        if self.is_forgetful or (message.forward is None and message.ticket not in self.tickets):
            return GONE
        self.tickets.discard(message.ticket or "")
        return BackwardResponse(grad_hidden=message.grad_hidden * 2)


def call(peers: Peers, view: SwarmView) -> BatchCall:
    inputs = SpanInputs(blocks=range(view.num_blocks), hidden=torch.ones(1, 2, 4))
    return BatchCall(Servers(peers, view), inputs, keep=True)


async def backward(chain: BatchCall) -> torch.Tensor | None:
    grads = SpanOutputs(hidden=torch.ones(1, 2, 4))
    return (await chain.backward(grads, needs_hidden=True, needs=()))[0]


async def test_a_second_backward_gives_the_same_gradient() -> None:
    first, second = Doubler(), Doubler()
    async with in_swarm({"a": ((0, 1), first), "b": ((1, 2), second)}, num_blocks=2) as (peers, view):
        chain = call(peers, view)
        outputs = await chain.forward()
        assert outputs.hidden.eq(4).all()
        for _ in range(3):
            grad = await backward(chain)
            assert grad is not None
            assert grad.eq(4).all()
    # The graph serves the first; the others send the inputs along without asking for a graph that is gone.
    assert [request.ticket is None for request in first.backwards] == [False, True, True]


async def test_a_lost_graph_is_computed_again_on_the_same_server_which_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Doubler()
    async with in_swarm({"a": ((0, 1), server)}, num_blocks=1) as (peers, view):
        chain = call(peers, view)
        for _ in range(2):
            await chain.forward()
            server.tickets.clear()
            grad = await backward(chain)
            assert grad is not None
            assert grad.eq(2).all()
        assert not view.banned()
    [said] = [one.getMessage() for one in caplog.records if "--activation-bytes" in one.getMessage()]
    assert said.startswith("server a did not keep the graph of a forward of ")


async def test_a_server_that_always_says_the_graph_is_gone_is_not_asked_for_ever() -> None:
    server = Doubler()
    server.is_forgetful = True
    async with in_swarm({"a": ((0, 1), server)}, num_blocks=1, max_retries=1) as (peers, view):
        chain = call(peers, view)
        await chain.forward()
        with pytest.raises(MissingBlocksError, match=r"left out after failures: a; the last failure: .*gone") as raised:
            await backward(chain)
        # The causes are in the sentence: what to do stands under one traceback, not several.
        assert "".join(traceback.format_exception(raised.value)).count("Traceback") == 1
    assert len(server.backwards) == 2


async def test_a_refusal_says_nothing_of_a_servers_pace() -> None:
    server = Doubler()
    async with in_swarm({"a": ((0, 1), server)}, num_blocks=1, max_retries=1) as (peers, view):
        chain = call(peers, view)
        await chain.forward()
        tokens = 1000
        assert judging.timeout_s(peers.book["a"], "rpc_backward", tokens) == 10.0
        server.tickets.clear()
        server.is_forgetful = True
        with pytest.raises(MissingBlocksError):
            await backward(chain)
        assert judging.timeout_s(peers.book["a"], "rpc_backward", tokens) == 10.0


async def test_a_server_is_left_out_for_router_logits_of_another_width() -> None:
    def answer(message: Message) -> Message:
        assert isinstance(message, ForwardRequest)
        return ForwardResponse(hidden=message.hidden, router_logits=(torch.zeros(2, 5),), router_blocks=(0,))

    inputs = SpanInputs(blocks=range(1), hidden=torch.ones(1, 2, 4), collect_router=True, routers={0: 4, 1: 4})
    async with in_swarm({"a": ((0, 1), answer)}, num_blocks=1, max_retries=1) as (peers, view):
        with pytest.raises(
            MissingBlocksError, match=r"left out after failures: a; .*experts \{0: 5\}, expected \{0: 4\}"
        ):
            await BatchCall(Servers(peers, view), inputs, keep=False).forward()


async def test_cancelling_what_ends_calls_told_ahead_ends_them_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    is_closing, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow(Told[Any, Any]):
        async def close(self) -> None:
            is_closing.set()
            await may_end.wait()
            await super().close()
            ended.set()

    async def tell(calls: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(training, "Told", Slow)
    monkeypatch.setattr(training, "tell", tell)
    async with in_swarm({}, num_blocks=2) as (peers, view):

        async def use() -> None:
            calls: Any = [(peer, SimpleNamespace(tokens=5, input=lambda: torch.zeros(1))) for peer in "ab"]
            async with training._told(Servers(peers, view), calls):
                assert peers.book["b"].backlog.tokens_before(0) == 5

        using = asyncio.create_task(use())
        await is_closing.wait()
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
        assert not ended.is_set()
        may_end.set()
        await ended.wait()
        assert peers.book["b"].backlog.tokens_before(0) == 0
