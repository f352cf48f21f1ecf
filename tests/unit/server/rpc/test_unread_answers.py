"""Readers that do not read: their answers take bounded memory, and others are served."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import torch
import virtual_time

from swarm_plugins.ledger import Charge, Ledger
from swarm_plugins.server.rpc.handlers import Answer, answer_requests
from swarm_plugins.server.service import ServiceCounts
from swarm_plugins.transport.messages import ExpertsResponse, Failure, Message
from swarm_plugins.transport.server_info import InfoRequest


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
        ledger = Ledger(16_000, max_peer_share=0.25)
        service = SimpleNamespace(ledger=ledger, counts=ServiceCounts())

        async def answer(_: Message, __: Charge) -> Answer:
            return ExpertsResponse(rows=torch.zeros(10, 40)), "none"

        readers = [StuckReader() for _ in range(5)]
        tasks = [
            asyncio.create_task(
                answer_requests(service, "rpc_experts", (InfoRequest,), answer, reader)  # type: ignore[arg-type]
            )
            for reader in readers
        ]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert service.ledger.used == 0
        return readers

    readers = virtual_time.run(scene(), timeout_s=9.0)
    assert [[failure.kind for failure in reader.failures] for reader in readers] == [[], [], *[["overloaded"]] * 3]
