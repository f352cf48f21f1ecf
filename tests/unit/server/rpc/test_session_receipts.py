"""The receipt of a session's step names all that the cache has come from, or nothing."""

from __future__ import annotations

import msgspec
import pytest
import torch
from fake_server import WIDTH
from session_kit import OPEN, ask, playing, step_of

from swarm_plugins.block_io import CacheOp
from swarm_plugins.errors import ProtocolError
from swarm_plugins.server.service import Service
from swarm_plugins.transport.identity import new_identity
from swarm_plugins.transport.messages import Failure, Message, SessionOpened, SessionStep, SessionStepResponse
from swarm_plugins.transport.receipts import check_receipt, first_history, history_after

IDENTITY = new_identity()
NONCE = b"n" * 16


@pytest.fixture(autouse=True)
def signing(service: Service) -> None:
    service.identity = IDENTITY


def signed_step(num_tokens: int, cached: int, **fields: object) -> SessionStep:
    return step_of(num_tokens, cached, nonce=NONCE, **fields)  # type: ignore[arg-type]


def named(answer: Message) -> bytes:
    """Returns the history that an answer's receipt names."""
    assert isinstance(answer, SessionStepResponse)
    assert answer.receipt is not None
    return answer.receipt.history


async def test_each_receipt_names_the_opening_and_the_steps_before(service: Service) -> None:
    async with playing(service) as (channel, _):
        opened = msgspec.structs.replace(OPEN, prefix=(torch.ones(1, 1, 2, 2),) * 8)
        await ask(channel, opened)
        steps = [
            signed_step(5, 2),
            signed_step(1, 7, value=2.0),
            signed_step(1, 4, ops=(CacheOp(kind="crop", indices=(4,)),)),
        ]
        history = first_history(opened)
        for index, step in enumerate(steps):
            answer = await ask(channel, step)
            assert named(answer) == history == history_after(opened, steps[:index])
            assert isinstance(answer, SessionStepResponse)
            with pytest.raises(ProtocolError, match="another history"):
                check_receipt(IDENTITY.peer_id, step, answer, b"x" * 32)
            _, history = check_receipt(IDENTITY.peer_id, step, answer, history)


async def test_a_step_that_failed_ends_the_history(service: Service) -> None:
    # It may be in the cache, or not: evidence that leaves it out, or has it, would accuse an honest server.
    async with playing(service) as (channel, _):
        await ask(channel, OPEN)
        assert named(await ask(channel, signed_step(2, 0))) == first_history(OPEN)
        failed = signed_step(1, 1, value=666.0, ops=(CacheOp(kind="crop", indices=(1,)),))
        assert isinstance(await ask(channel, failed), Failure)
        assert named(await ask(channel, signed_step(1, 1))) == b""


async def test_an_answer_that_cannot_be_sent_ends_the_history(service: Service) -> None:
    async with playing(service) as (channel, _):
        await ask(channel, OPEN)
        hidden = torch.full((1, 1, WIDTH), 65504.0, dtype=torch.float16)
        failed = SessionStep(hidden=hidden, cached_tokens=0, nonce=NONCE)
        answer = await ask(channel, failed)
        assert isinstance(answer, Failure)
        assert answer.kind == "not_finite_output"
        assert named(await ask(channel, signed_step(1, 1))) == b""


async def test_a_step_without_a_receipt_ends_the_history(service: Service) -> None:
    async with playing(service) as (channel, _):
        await ask(channel, OPEN)
        assert named(await ask(channel, signed_step(2, 0))) == first_history(OPEN)
        await ask(channel, step_of(1, 2))
        assert named(await ask(channel, signed_step(1, 3))) == b""


async def test_a_refused_step_is_no_part_of_the_history(service: Service) -> None:
    async with playing(service) as (channel, _):
        await ask(channel, OPEN)
        first = signed_step(2, 0)
        await ask(channel, first)
        for refused in (signed_step(1, 7), signed_step(1, 2, adapters=("unknown",))):
            assert isinstance(await ask(channel, refused), Failure)
        assert named(await ask(channel, signed_step(1, 2))) == history_after(OPEN, [first])


async def test_a_fork_begins_with_an_opening_that_says_so(service: Service) -> None:
    async with playing(service) as (channel, transport):
        opened = await ask(channel, OPEN)
        assert isinstance(opened, SessionOpened)
        await ask(channel, signed_step(2, 0))
        other = await transport.open("server", "rpc_session", timeout_s=5)
        fork = msgspec.structs.replace(OPEN, fork_of=opened.session)
        await ask(other, fork)
        assert named(await ask(other, signed_step(1, 2))) == first_history(fork)
