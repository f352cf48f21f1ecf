"""Hostile owners: every size, index and shape of a request is checked before anything is allocated for it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from holders_kit import Held, Holders, serving

from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.offload.held import load_held_experts
from swarm_plugins.transport.messages import ExpertsRequest, ExpertsResponse, Failure, ForwardRequest, Message

WIDTH = 32
MAX_TOKENS = 64


def request_of(served: str, **changes: Any) -> ExpertsRequest:
    honest = ExpertsRequest(
        version=served,
        block=1,
        experts=(1, 2),
        counts=(2, 1),
        hidden=torch.ones(2, WIDTH),
        rows=torch.tensor([0, 1, 1], dtype=torch.int32),
    )
    return msgspec.structs.replace(honest, **changes)


def ask(holders: Holders, *messages: Message) -> list[Message | None]:
    """Sends messages on one stream, and returns the answers."""

    async def scene() -> list[Message | None]:
        channel = await holders.transport.open("a", "rpc_experts", timeout_s=5.0)
        answers = []
        for message in messages:
            await channel.send(message)
            answers.append(await channel.receive(timeout_s=20.0))
        await channel.close()
        return answers

    return holders.connection.loop.run(asyncio.wait_for(scene(), 60.0))


NAN = torch.full((2, WIDTH), float("nan"))
ATTACKS = {
    "version": ({"version": "x" * 40}, "wrong_version", "the request is for 'xxx"),
    "block": ({"block": 7}, "wrong_span", "experts of block 7"),
    "huge-block": ({"block": 1 << 62}, "wrong_span", "are asked for"),
    "negative-block": ({"block": -1}, "wrong_span", "experts of block -1"),
    "slice": ({"slice": (0, 2)}, "wrong_span", r"slice \(0, 2\)"),
    "foreign-expert": ({"experts": (1, 3)}, "bad_request", r"expected ascending ones of 0:3"),
    "negative-expert": ({"experts": (-1, 2)}, "bad_request", r"experts \[-1, 2\]"),
    "huge-expert": ({"experts": (1, 1 << 60)}, "bad_request", "expected ascending"),
    "twice": ({"experts": (1, 1)}, "bad_request", "expected ascending"),
    "descending": ({"experts": (2, 1)}, "bad_request", "expected ascending"),
    "no-expert": ({"experts": (), "counts": ()}, "bad_request", "expected ascending"),
    "many-experts": ({"experts": tuple(range(20_000)), "counts": (1,) * 20_000}, "bad_request", "expected ascending"),
    "huge-count": ({"counts": (1 << 62, 1)}, "bad_request", "with the sum 3"),
    "negative-count": ({"counts": (4, -1)}, "bad_request", "at least 1"),
    "zero-count": ({"counts": (3, 0)}, "bad_request", "at least 1"),
    "too-few-counts": ({"counts": (3,)}, "bad_request", "counts has 1 entries"),
    "counts-that-lie": ({"counts": (2, 2)}, "bad_request", "the sum 4, expected"),
    "foreign-token": ({"rows": torch.tensor([0, 1, 2], dtype=torch.int32)}, "bad_request", "tokens 0 to 2, there are"),
    "negative-token": ({"rows": torch.tensor([0, -1, 1], dtype=torch.int32)}, "bad_request", "names tokens -1 to 1"),
    "rows-of-int64": ({"rows": torch.tensor([0, 1, 1])}, "bad_request", "expected .rows. of int32"),
    "rows-as-floats": ({"rows": torch.zeros(3)}, "bad_request", "of int32"),
    "rows-in-two-dims": ({"rows": torch.zeros(3, 1, dtype=torch.int32)}, "bad_request", r"rows has shape \[3, 1\]"),
    "no-rows": ({"rows": torch.zeros(0, dtype=torch.int32)}, "bad_request", "has 0 rows, expected 1 to 64"),
    "too-many-rows": (
        {"rows": torch.zeros(65, dtype=torch.int32), "counts": (64, 1)},
        "bad_request",
        "has 65 rows, expected 1 to 64: split it",
    ),
    "idle-tokens": ({"hidden": torch.ones(9, WIDTH)}, "bad_request", "9 tokens for 3 rows"),
    "narrow": ({"hidden": torch.ones(2, WIDTH - 1)}, "bad_request", r"hidden has shape \[2, 31\], expected"),
    "three-dims": ({"hidden": torch.ones(1, 2, WIDTH)}, "bad_request", "hidden has shape"),
    "no-tokens": ({"hidden": torch.ones(0, WIDTH)}, "bad_request", "none of them 0"),
    "integers": ({"hidden": torch.ones(2, WIDTH, dtype=torch.int64)}, "bad_request", "dtype int64"),
    "nan": ({"hidden": NAN}, "not_finite", "hidden of shape"),
    "infinite": ({"hidden": NAN.nan_to_num(nan=float("inf"))}, "not_finite", "NaN or infinity"),
    "short-gradient": ({"grad": torch.ones(2, WIDTH)}, "bad_request", r"grad has shape \[2, 32\], expected \[3, 32\]"),
    "wide-gradient": ({"grad": torch.ones(3, WIDTH * 2)}, "bad_request", "grad has shape"),
    "nan-gradient": ({"grad": torch.full((3, WIDTH), float("nan"))}, "not_finite", "grad of shape"),
    "integer-gradient": ({"grad": torch.ones(3, WIDTH, dtype=torch.int32)}, "bad_request", "grad has dtype"),
    "overflow": ({"hidden": torch.full((2, WIDTH), 1e30)}, "not_finite_output", "output of the experts"),
}


def test_each_attack_is_one_typed_refusal_and_the_stream_lives_on(mixtral: Path) -> None:
    with serving(mixtral, {"a": Held(range(3))}, max_batch_tokens=MAX_TOKENS) as holders:
        info = holders.connection.loop.run(holders.connection.peers.info("a"))
        honest = request_of(info.version)
        (first,) = ask(holders, honest)
        assert isinstance(first, ExpertsResponse)
        attacks = [request_of(info.version, **changes) for changes, _, _ in ATTACKS.values()]
        answers = ask(holders, *attacks, honest)
        for (name, (_, kind, words)), answer in zip(ATTACKS.items(), answers, strict=False):
            assert isinstance(answer, Failure), name
            assert answer.kind == kind, (name, answer)
            assert re.search(words, answer.message), (name, answer)
        assert isinstance(answers[-1], ExpertsResponse)
        assert torch.equal(answers[-1].rows, first.rows)


def test_other_messages_and_other_rpcs_are_refused(mixtral: Path) -> None:
    with serving(mixtral, {"a": Held(range(3))}) as holders:
        other = ForwardRequest(version="v", start=0, end=1, hidden=torch.ones(1, 1, WIDTH))
        (answer,) = ask(holders, other)
        assert isinstance(answer, Failure)
        assert "rpc_experts got a ForwardRequest, expected ExpertsRequest" in answer.message


def test_one_owner_cannot_fill_the_queue(mixtral: Path) -> None:
    """More large requests at once than one peer may have waiting: some are refused as overloaded, none hangs."""
    rows = 2048
    with serving(mixtral, {"a": Held(range(3))}, max_batch_tokens=rows) as holders:
        info = holders.connection.loop.run(holders.connection.peers.info("a"))
        large = request_of(
            info.version, counts=(rows - 1, 1), hidden=torch.ones(2, WIDTH), rows=torch.ones(rows, dtype=torch.int32)
        )

        async def flood() -> list[Message | None]:
            async def one() -> Message | None:
                channel = await holders.transport.open("a", "rpc_experts", timeout_s=5.0)
                await channel.send(large)
                answer = await channel.receive(timeout_s=30.0)
                await channel.close()
                return answer

            return await asyncio.gather(*(one() for _ in range(40)))

        answers = holders.connection.loop.run(flood())
    kinds = {answer.kind if isinstance(answer, Failure) else "served" for answer in answers}
    assert "served" in kinds
    assert kinds <= {"served", "overloaded"}


@pytest.mark.parametrize("grad", [None, torch.ones(9, WIDTH)], ids=["forward", "backward"])
def test_many_rows_of_one_expert_run_in_parts(mixtral: Path, grad: torch.Tensor | None) -> None:
    held = load_held_experts(Checkpoint.open(mixtral), range(1, 2), range(4), device=torch.device("cpu"))
    rows = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(0))
    spans = {0: slice(0, 2), 2: slice(2, 9)}
    whole = held.run(1, rows, spans, grad)
    boundaries: list[int] = []
    held.rows_at_once = 3
    held.on_block_boundary = lambda: boundaries.append(1)
    torch.testing.assert_close(held.run(1, rows, spans, grad), whole)
    assert len(boundaries) == 1 + 3
    held.close()
