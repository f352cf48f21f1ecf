"""Sessions leave servers that have become slow, and an invented speed costs few calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch
import virtual_time
from client_kit import VERSION, server_info

from swarm_plugins.block_io import SpanInputs
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.discovery.view import SwarmView
from swarm_plugins.client.peers import Peers
from swarm_plugins.client.servers import Servers
from swarm_plugins.client.sessions.session import ClientSession
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.channel import Channel, Handler
from swarm_plugins.transport.messages import (
    Failure,
    Message,
    SessionOpen,
    SessionOpened,
    SessionStep,
    SessionStepResponse,
)
from swarm_plugins.transport.server_info import InfoRequest


class Server:
    """A slow server; each answer is the sum of its session so far, which a replay has to rebuild."""

    def __init__(self, decode_s: float, *, start: int = 0, end: int = 2, kv_row_tokens: int = 0) -> None:
        figures = {"decode_s": decode_s, "throughput": 1.0 / decode_s, "kv_row_tokens": kv_row_tokens}
        self.info = server_info(start, end, 2, **figures)
        self.delay_s = 0.0
        self.is_full = False
        self.steps: list[int] = []

    def handlers(self) -> dict[str, Handler]:
        return dict.fromkeys(("rpc_info", "rpc_session"), self.handle)

    async def handle(self, channel: Channel) -> None:
        total = torch.zeros(1, 1, 4)
        while (message := await channel.receive(timeout_s=60.0)) is not None:
            answer: Message = self.info
            if self.is_full and isinstance(message, SessionOpen | SessionStep):
                answer = Failure(kind="out_of_memory", message="full")
            elif isinstance(message, SessionOpen):
                answer = SessionOpened(session="s", max_tokens=1000)
            elif isinstance(message, SessionStep):
                await asyncio.sleep(self.delay_s)
                self.steps.append(message.hidden.shape[1])
                totals = total + message.hidden.cumsum(1)
                total = totals[:, -1:]
                answer = SessionStepResponse(hidden=totals)
            else:
                assert isinstance(message, InfoRequest)
            await channel.send(answer)


async def generate(
    servers: Servers, tokens: int, on_token: Callable[[int], None] = lambda _: None, *, rows: int = 1
) -> list[float]:
    session = ClientSession(servers, blocks=range(2))
    found = []
    for number in range(tokens):
        on_token(number)
        outputs = await session.step(SpanInputs(blocks=range(2), hidden=torch.full((rows, 1, 4), float(number))), ())
        found.append(float(outputs.hidden[0, -1, 0]))
    await session.close()
    return found


def sums(tokens: int) -> list[float]:
    return [number * (number + 1) / 2 for number in range(tokens)]


def test_a_step_that_is_interrupted_while_the_session_moves_leaves_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(servers: Servers) -> None:
        session = ClientSession(servers, blocks=range(2))
        inputs = SpanInputs(blocks=range(2), hidden=torch.ones(1, 1, 4))
        await session.step(inputs, ())

        async def interrupted(rows: int) -> None:
            raise asyncio.CancelledError

        with monkeypatch.context() as patched:
            patched.setattr(session, "_leave_slow", interrupted)
            with pytest.raises(asyncio.CancelledError):
                await session.step(inputs, ())
        assert [span.history.length for span in session._spans] == [1]
        await session.step(inputs, ())
        assert [span.history.length for span in session._spans] == [2]
        await session.close()

    run({"A": Server(0.1)}, use)


def run(machines: dict[str, Server], use: Callable[[Servers], Awaitable[None]]) -> None:
    async def main() -> None:
        swarm = LocalTransport({peer: machine.handlers() for peer, machine in machines.items()})
        peers = Peers(swarm, SwarmConfig())
        view = SwarmView(swarm, peers, peers.config, version=VERSION, num_blocks=2)
        try:
            await use(Servers(peers, view))
        finally:
            await peers.close()
            await swarm.close()

    virtual_time.run(main(), timeout_s=120)


def test_a_session_on_a_link_that_became_slow_moves_to_a_faster_server() -> None:
    machines = {"a": Server(1e-5), "b": Server(0.015)}

    def slow_down(number: int) -> None:
        machines["a"].delay_s = 0.3 if number >= 20 else 0.0

    async def use(servers: Servers) -> None:
        assert await generate(servers, 60, slow_down) == sums(60)

    run(machines, use)
    assert 24 <= len(machines["a"].steps) <= 30
    # One replay of all tokens, then the rest.
    assert machines["b"].steps[0] == len(machines["a"].steps)
    assert len(machines["b"].steps) == 61 - len(machines["a"].steps)


def test_a_session_may_move_to_several_servers() -> None:
    machines = {"a": Server(1e-5), "b": Server(1e-3, end=1), "c": Server(1e-3, start=1)}

    def slow_down(number: int) -> None:
        machines["a"].delay_s = 0.3 if number >= 8 else 0.0

    async def use(servers: Servers) -> None:
        await generate(servers, 30, slow_down)

    run(machines, use)
    assert len(machines["a"].steps) <= 20
    assert sum(machines["b"].steps) == sum(machines["c"].steps) == 30


def test_a_session_stays_where_another_server_would_not_be_clearly_faster_or_has_no_room() -> None:
    machines = {"a": Server(1e-5), "b": Server(0.05)}
    machines["a"].delay_s = 0.06

    async def use(servers: Servers) -> None:
        await generate(servers, 16)

    run(machines, use)
    assert not machines["b"].steps
    machines["a"].delay_s, machines["b"] = 0.2, Server(1e-3)
    machines["b"].is_full = True
    run(machines, use)
    assert len(machines["a"].steps) == 32


@pytest.mark.parametrize(("rows", "is_room"), [(3, True), (4, False)])
def test_a_session_begins_moves_and_goes_on_only_where_there_is_room_for_the_states_of_its_rows(
    rows: int, is_room: bool
) -> None:
    # 1000 tokens, of which each row after the first takes 400 in addition to its own.
    machines = {"near": Server(1e-5, kv_row_tokens=400), "roomy": Server(1e-3)}

    async def use(servers: Servers) -> None:
        assert await generate(servers, 3, rows=rows) == sums(3)

    run(machines, use)
    assert bool(machines["near"].steps) == is_room
    machines = {"slow": Server(1e-5), "other": Server(1e-3, kv_row_tokens=400)}
    machines["slow"].delay_s = 0.3

    async def use_long(servers: Servers) -> None:
        assert await generate(servers, 30, rows=rows) == sums(30)

    run(machines, use_long)
    assert bool(machines["other"].steps) == is_room
    machines = {"lost": Server(1e-6), "near": Server(1e-5, kv_row_tokens=400), "roomy": Server(1e-3)}

    def lose(number: int) -> None:
        machines["lost"].is_full = number >= 3

    async def use_lost(servers: Servers) -> None:
        assert await generate(servers, 6, lose, rows=rows) == sums(6)

    run(machines, use_lost)
    assert len(machines["lost"].steps) == 3
    assert bool(machines["near"].steps) == is_room


def test_an_invented_speed_costs_at_most_ten_calls() -> None:
    machines = {"liar": Server(1e-9), "honest": Server(1e-3)}
    machines["liar"].delay_s = 0.5

    async def use(servers: Servers) -> None:
        for _ in range(30):
            assert await generate(servers, 6) == sums(6)

    run(machines, use)
    assert len(machines["liar"].steps) <= 10
