"""While a server is late, a replica is asked too: few requests, the same numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.book.rules import Rules
from swarm_plugins.client import SwarmConfig
from swarm_plugins.client.calls.hedging import HedgeBudget, first_answer
from swarm_plugins.testing import InProcessSwarm
from swarm_plugins.testing.models import save_tiny
from swarm_plugins.transport.channel import Channel, Handler
from swarm_plugins.transport.messages import BackwardResponse, Codec, ForwardResponse, Message

IDS = torch.randint(5, 100, (2, 12), generator=torch.Generator().manual_seed(1))
WARM_UP = 10
"""Steps after which the time that a server needs as a rule is known."""


async def test_the_first_answer_counts_and_the_late_request_is_cancelled() -> None:
    ended: list[str] = []

    async def answer(name: str, seconds: float, error: Exception | None = None) -> str:
        try:
            await asyncio.sleep(seconds)
            if error is not None:
                raise error
            return name
        finally:
            ended.append(name)

    async def ask(first: tuple[float, Exception | None], *spares: tuple[float, Exception | None]) -> str:
        left = [answer(f"spare{index}", *spare) for index, spare in enumerate(spares)]

        def spare() -> Coroutine[Any, Any, str] | None:
            return left.pop(0) if left else None

        ended.clear()
        try:
            return await first_answer(answer("first", *first), spare, late_s=0.05, most=2)
        finally:
            for unused in left:
                unused.close()

    assert await ask((0.0, None), (0.0, None)) == "first"
    assert ended == ["first"]
    assert await ask((60.0, None), (0.0, None)) == "spare0"
    assert sorted(ended) == ["first", "spare0"]
    assert await ask((60.0, None), (60.0, None), (0.0, None)) == "spare1"
    assert sorted(ended) == ["first", "spare0", "spare1"]
    # Errors of replicas count for nothing, those of the server at once.
    assert await ask((0.3, None), (0.0, ValueError("a replica's")), (0.0, ValueError("a replica's"))) == "first"
    with pytest.raises(ValueError, match="its own"):
        await ask((0.1, ValueError("its own")), (60.0, None))
    assert await ask((0.2, None)) == "first"


def test_further_requests_are_a_small_share_of_all() -> None:
    budget = HedgeBudget(Rules())
    taken = 0
    for _ in range(1000):
        budget.earn()
        taken += budget.take()
    assert taken == 51
    for _ in range(1000):
        budget.earn()
    assert sum(budget.take() for _ in range(100)) == 4


class Stalling:
    """The channels of a server whose next answers of some kinds never come."""

    def __init__(self) -> None:
        self.stalled: set[type[Message]] = set()
        self.num_stalled = 0

    def wrap(self, handler: Handler) -> Handler:
        async def handle(channel: Channel) -> None:
            await handler(_StallingChannel(channel, self))

        return handle


class _StallingChannel:
    def __init__(self, inner: Channel, stalling: Stalling) -> None:
        self._inner = inner
        self._stalling = stalling
        self.remote_peer = inner.remote_peer

    async def send(self, message: Message, *, codec: Codec = "none") -> None:
        if type(message) in self._stalling.stalled:
            self._stalling.stalled.discard(type(message))
            self._stalling.num_stalled += 1
            await asyncio.sleep(60.0)
        await self._inner.send(message, codec=codec)

    async def receive(self, *, timeout_s: float) -> Message | None:
        return await self._inner.receive(timeout_s=timeout_s)

    async def close(self) -> None:
        await self._inner.close()


def train(directory: Path, stalls: dict[int, type[Message]]) -> tuple[list[float], list[torch.Tensor], int]:
    """Returns losses, final parameters and the number of answers that did not come; ``stalls`` says at which steps."""
    with InProcessSwarm(directory, spans=[(0, 4), (0, 4)], config=SwarmConfig(verify="off", micro_batches=1)) as swarm:
        stalling = Stalling()
        handlers = swarm.transport._handlers_by_peer
        swarm.transport._handlers_by_peer = {
            peer: {rpc: stalling.wrap(handler) for rpc, handler in rpcs.items()} for peer, rpcs in handlers.items()
        }
        model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        torch.manual_seed(0)
        config = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
        parameters = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        losses = []
        for step in range(WARM_UP + len(stalls)):
            stalling.stalled = {stalls[step]} if step in stalls else set()
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [one.detach().clone() for one in parameters], stalling.num_stalled


def test_answers_that_never_come_change_no_bit_of_a_training_and_ban_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "swarm_plugins.client")
    monkeypatch.setattr(HedgeBudget, "take", lambda self: True)  # a busy machine may have used it up before
    directory = Path(save_tiny("llama", tmp_path / "tiny"))
    stalls = {WARM_UP: ForwardResponse, WARM_UP + 1: BackwardResponse}
    losses, parameters, num_stalled = train(directory, stalls)
    assert num_stalled == 2
    plain_losses, plain_parameters, none = train(
        directory, {WARM_UP + 5: ForwardResponse, WARM_UP + 6: ForwardResponse}
    )
    assert none == 0
    assert losses == plain_losses
    assert all(torch.equal(one, other) for one, other in zip(parameters, plain_parameters, strict=True))
