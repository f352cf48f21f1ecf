"""Readers that do not read: their answers take bounded memory, and others are served."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarm_plugins.server.failures import RequestError
from swarm_plugins.server.rpc.handlers import Answer, answer_requests
from swarm_plugins.server.state.unsent import UnsentAnswers
from swarm_plugins.transport.messages import ExpertsResponse, Failure, InfoRequest, Message


def test_one_reader_gets_a_quarter_and_all_together_the_limit() -> None:
    unsent = UnsentAnswers(1000)
    with unsent.holding("a", 900), pytest.raises(RequestError, match=r"900 bytes to this client .* limit of 1000"):
        unsent.holding("a", 1).__enter__()
    with unsent.holding("a", 200), unsent.holding("b", 700):
        with pytest.raises(RequestError, match="0 bytes to this client and 900 bytes to all wait to be read, 200 more"):
            unsent.holding("c", 200).__enter__()
        with unsent.holding("c", 100):
            pass
    with unsent.holding("a", 1000):
        pass


class StuckReader:
    """Asks for large answers, and reads only failures."""

    remote_peer = "stuck"

    def __init__(self) -> None:
        self.failures: list[Failure] = []

    async def receive(self, *, timeout_s: float) -> Message:
        if self.failures:
            await asyncio.sleep(60.0)
        return InfoRequest()

    async def send(self, message: Message, *, codec: str = "none") -> None:
        if not isinstance(message, Failure):
            await asyncio.sleep(60.0)
        self.failures.append(message)  # type: ignore[arg-type]


def test_a_peer_that_does_not_read_is_refused_when_its_answers_fill_its_share() -> None:
    async def scene() -> list[StuckReader]:
        unsent = UnsentAnswers(16_000)

        async def answer(_: Message) -> Answer:
            return ExpertsResponse(rows=torch.zeros(10, 40)), "none"

        readers = [StuckReader() for _ in range(5)]
        tasks = [
            asyncio.create_task(
                answer_requests(reader, "rpc_experts", (InfoRequest,), answer, idle_s=9.0, unsent=unsent)  # type: ignore[arg-type]
            )
            for reader in readers
        ]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with unsent.holding("other", 16_000):
            return readers

    readers = asyncio.run(scene())
    assert [[failure.kind for failure in reader.failures] for reader in readers] == [[], [], *[["overloaded"]] * 3]
