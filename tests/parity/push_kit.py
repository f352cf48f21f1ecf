"""Servers of three spans that push to each other, and what may happen to them and to what they push."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kits.liars import LyingSwarm
from swarm_plugins import AutoSwarmModelForCausalLM
from swarm_plugins.book import judging
from swarm_plugins.client import SwarmConfig
from swarm_plugins.ledger import Charge
from swarm_plugins.server.rpc import checks
from swarm_plugins.server.state.pushes import Pushes
from swarm_plugins.transport.messages import Codec, PushTo

SHORT_S, LONG_S = 0.2, 10.0
"""Patience with pushed inputs: where some are lost, and longer than any process of a test is held up."""
SPANS = [(0, 1), (1, 2), (2, 4)]
REPLICAS = [span for span in SPANS for _ in range(2)]


def swarm_of(model: Any, spans: list[tuple[int, int]] = SPANS, **settings: Any) -> LyingSwarm:
    """Returns a swarm whose servers push, unless told otherwise."""
    return LyingSwarm(model, spans=spans, config=SwarmConfig(**{"push": "on", **settings}))


def remote(swarm: LyingSwarm) -> Any:
    return AutoSwarmModelForCausalLM.from_pretrained(swarm.directory, connection=swarm.connection)


def decode(model: PreTrainedModel, ids: Tensor, new_tokens: int, **settings: Any) -> Tensor:
    """Returns the prompt and exactly so many greedy tokens."""
    output: Tensor = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        **settings,
    )
    return output


def taken(swarm: LyingSwarm) -> list[int]:
    """Returns how many pushed outputs each server has used."""
    return [service.pushes.num_taken for service in swarm.services.values()]


def refused(swarm: LyingSwarm) -> list[int]:
    return [service.pushes.num_refused for service in swarm.services.values()]


def set_patience(monkeypatch: pytest.MonkeyPatch, patience_s: float) -> None:
    """Sets after what time a client sends a pushed input itself."""
    monkeypatch.setattr(judging, "push_wait_s", lambda *_: patience_s)


def in_session(swarm: LyingSwarm) -> list[str]:
    """Returns the servers that have sessions, in the order of their blocks."""
    return [peer for peer in swarm.peers if len(swarm.services[peer].sessions)]


async def kill(swarm: LyingSwarm, peer: str) -> None:
    """Kills a server, also from within one of its own handlers, which ends here."""
    killing = asyncio.create_task(swarm.transport.kill(peer))
    await asyncio.sleep(0.01)  # cancelled here, if this is its own handler
    await killing


Way = tuple[Pushes, str]
Send = Callable[[Tensor], Awaitable[str]]


def replace_pushes(monkeypatch: pytest.MonkeyPatch, push: Callable[[int, Tensor, Send], Awaitable[str]]) -> list[Way]:
    """Has each push done by a function of its number, from 1, what is pushed, and what pushes it.

    Returns:
        Sender and receiver of each push, noted as they begin.
    """
    ways: list[Way] = []
    send = Pushes.send

    async def replaced(self: Pushes, client: str, to: PushTo, hidden: Tensor, codec: Codec, charge: Charge) -> str:
        ways.append((self, to.peer))
        return await push(len(ways), hidden, lambda other: send(self, client, to, other, codec, charge))

    monkeypatch.setattr(Pushes, "send", replaced)
    return ways


def strike_at_push(
    monkeypatch: pytest.MonkeyPatch, number: int, strike: Callable[[], Awaitable[None]], *, is_sent: bool
) -> list[Way]:
    """Has something happen right before or right after the push of that number; then the client is impatient."""

    async def push(current: int, hidden: Tensor, send: Send) -> str:
        is_due = current == number
        if is_due:
            set_patience(monkeypatch, SHORT_S)
        if is_due and not is_sent:
            await strike()
        why = await send(hidden)
        if is_due and is_sent:
            await strike()
        return why

    return replace_pushes(monkeypatch, push)


LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "a bit more": lambda hidden: hidden * 1.05,
    "what overflows": lambda hidden: hidden * 1e30,
    "NaN": lambda hidden: hidden * torch.nan,
    "another shape": lambda hidden: hidden[:, :, 1:],
}


def overflow_beyond_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has servers fail at numbers that are too large for float16, as those do that compute in it."""
    checked = checks.checked_output

    def narrow(tensor: Tensor, *args: Any) -> Tensor:
        return checked(tensor * torch.inf if float(tensor.abs().amax()) > 65504 else tensor, *args)

    monkeypatch.setattr(checks, "checked_output", narrow)


def falsify_pushes(
    monkeypatch: pytest.MonkeyPatch, number: int, lie: Callable[[Tensor], Tensor] = LIES["a bit more"]
) -> list[Way]:
    """Has servers push something else from the push of that number on, and answer their client as before."""

    async def push(current: int, hidden: Tensor, send: Send) -> str:
        return await send(lie(hidden) if current >= number else hidden)

    return replace_pushes(monkeypatch, push)


def losses(send_numbers: Sequence[int], *, every: int) -> list[Any]:
    """Returns which of three servers is lost, at which push, and whether that has been sent.

    `make test` takes one of so many.
    """
    return [
        pytest.param(*case, marks=pytest.mark.slow if place % every else (), id="-".join(map(str, case)))
        for place, case in enumerate(itertools.product(range(3), send_numbers, (False, True)))
    ]
