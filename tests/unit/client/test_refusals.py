"""Servers that find fault with a request, or fail, are believed only if no other server carries it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from client_kit import in_swarm

from swarm_plugins.block_io import SpanInputs, SpanOutputs
from swarm_plugins.book.record import Forgiven
from swarm_plugins.client.discovery.view import SwarmView
from swarm_plugins.client.peers import Peers
from swarm_plugins.client.servers import Servers
from swarm_plugins.client.sessions.session import ClientSession
from swarm_plugins.client.training.batch import BatchCall
from swarm_plugins.errors import RefusedError
from swarm_plugins.transport.messages import (
    BackwardRequest,
    BackwardResponse,
    Failure,
    FailureKind,
    ForwardRequest,
    ForwardResponse,
    Message,
    SessionOpen,
    SessionOpened,
    SessionStep,
    SessionStepResponse,
)

INPUTS = SpanInputs(blocks=range(1), hidden=torch.ones(1, 2, 4))
refusals = pytest.mark.parametrize("kind", ["bad_request", "not_finite"])


class Server:
    """Adds one for each request of its blocks, or refuses messages of some kinds."""

    def __init__(self, refuses: tuple[type[Message], ...] = (), kind: FailureKind = "bad_request") -> None:
        self.refuses = refuses
        self.kind = kind
        self.num_asked = 0

    def __call__(self, message: Message) -> Message:
        self.num_asked += 1
        if isinstance(message, self.refuses):
            return Failure(kind=self.kind, message="that is wrong")
        if isinstance(message, ForwardRequest):
            return ForwardResponse(hidden=message.hidden + message.end - message.start)
        if isinstance(message, BackwardRequest):
            return BackwardResponse(grad_hidden=message.grad_hidden)
        if isinstance(message, SessionOpen):
            return SessionOpened(session="s", max_tokens=1000)
        assert isinstance(message, SessionStep)
        return SessionStepResponse(hidden=message.hidden + 1)


def call(peers: Peers, view: SwarmView) -> BatchCall:
    return BatchCall(Servers(peers, view), replace(INPUTS, blocks=range(view.num_blocks)), keep=True)


async def with_liar_first(view: SwarmView, run: Callable[[], Any]) -> Any:
    """Runs with a plan that has the liar in it, and the honest server to fall back on."""
    await view.refresh(force=False)
    view.entries["liar"] = replace(view.entries["liar"], round_trip_s=0.0)
    return await run()


@refusals
async def test_a_forward_that_another_server_carries_out_counts_against_the_liar(kind: FailureKind) -> None:
    liar, honest = Server((ForwardRequest,), kind), Server()
    async with in_swarm({"liar": ((0, 2), liar), "honest": ((0, 2), honest)}, num_blocks=2) as (peers, view):
        outputs = await with_liar_first(view, lambda: call(peers, view).forward())
        assert outputs.hidden.eq(3).all()
        assert view.banned() == ["liar"]
    assert liar.num_asked == 1


async def test_the_rest_of_the_chain_stays_as_planned() -> None:
    last = Server()
    servers = {"liar": ((0, 1), Server((ForwardRequest,))), "honest": ((0, 1), Server()), "last": ((1, 2), last)}
    async with in_swarm(servers, num_blocks=2) as (peers, view):
        outputs = await with_liar_first(view, lambda: call(peers, view).forward())
        assert outputs.hidden.eq(3).all()
    assert last.num_asked == 1


async def test_a_backward_that_another_server_carries_out_counts_against_the_liar() -> None:
    servers = {"liar": ((0, 1), Server((BackwardRequest,))), "honest": ((0, 1), Server())}
    async with in_swarm(servers, num_blocks=1) as (peers, view):
        chain = call(peers, view)
        await with_liar_first(view, lambda: chain.forward())
        grads = SpanOutputs(hidden=torch.full((1, 2, 4), 5.0))
        found = (await chain.backward(grads, needs_hidden=True, needs=()))[0]
        assert found is not None
        assert found.eq(5).all()
        assert view.banned() == ["liar"]


async def test_a_session_that_another_server_carries_on_counts_against_the_liar() -> None:
    liar = Server()
    async with in_swarm({"liar": ((0, 1), liar), "honest": ((0, 1), Server())}, num_blocks=1) as (peers, view):
        session = ClientSession(Servers(peers, view), blocks=range(1))
        await with_liar_first(view, lambda: session.step(INPUTS))
        liar.refuses = (SessionStep,)
        outputs = await session.step(INPUTS)
        assert outputs.hidden.eq(2).all()
        assert view.banned() == ["liar"]
        await session.close()


@refusals
async def test_a_refusal_is_believed_when_all_servers_agree(kind: FailureKind) -> None:
    servers = {name: Server((ForwardRequest,), kind) for name in "abcdef"}
    async with in_swarm({name: ((0, 1), server) for name, server in servers.items()}, num_blocks=1) as (peers, view):
        with pytest.raises(RefusedError, match="that is wrong"):
            await call(peers, view).forward()
        assert view.banned() == []
    assert [server.num_asked for server in servers.values()] == [1] * 6


@pytest.mark.parametrize("kind", ["bad_request", "not_finite", "internal", "out_of_memory", "refused", "wrong_version"])
async def test_no_number_of_strangers_ends_a_call_that_another_server_carries_out(kind: FailureKind) -> None:
    liars = {f"liar{number}": Server((ForwardRequest, SessionOpen), kind) for number in range(12)}
    honest = Server()
    everyone = {name: ((0, 1), server) for name, server in {**liars, "honest": honest}.items()}
    async with in_swarm(everyone, num_blocks=1) as (peers, view):
        await view.refresh(force=False)
        for peer in liars:
            view.entries[peer] = replace(view.entries[peer], round_trip_s=0.0)
        assert (await call(peers, view).forward()).hidden.eq(2).all()
        for peer in liars:
            view.peers.book.observe(peer, Forgiven())
        await view.refresh(force=True)
        session = ClientSession(Servers(peers, view), blocks=range(1))
        assert (await session.step(INPUTS)).hidden.eq(2).all()
        await session.close()
    assert all(liar.num_asked for liar in liars.values())


async def test_the_only_server_is_believed_at_once() -> None:
    server = Server((ForwardRequest,))
    async with in_swarm({"a": ((0, 1), server)}, num_blocks=1) as (peers, view):
        with pytest.raises(RefusedError, match="that is wrong"):
            await call(peers, view).forward()
    assert server.num_asked == 1
