"""Answers that are larger than what was asked for: a server cannot fill the memory of those who ask it."""

from __future__ import annotations

import struct

import pytest
import torch
from stream_kit import both_loops, stream_and_socket

from swarm_plugins.adapter_spec import AdapterSpec
from swarm_plugins.errors import ProtocolError
from swarm_plugins.ledger import Ledger
from swarm_plugins.transport.messages import (
    AdapterUpload,
    BackwardRequest,
    BackwardResponse,
    EchoRequest,
    EchoResponse,
    ExpertsRequest,
    ExpertsResponse,
    Failure,
    ForwardRequest,
    ForwardResponse,
    Message,
    NormsRequest,
    NormsResponse,
    OpenedStates,
    OpenRequest,
    PushedHidden,
    SessionStep,
    SessionStepResponse,
)
from swarm_plugins.transport.receiving.allowances import Allowances
from swarm_plugins.transport.server_info import InfoRequest
from swarm_plugins.transport.wire import encode

MIB = 1 << 20
HIDDEN = torch.randn(2, 64, 4096)  # 2 MiB
FORWARD = ForwardRequest(version="v", start=0, end=3, hidden=HIDDEN)
HUGE = struct.pack("<2sBBIQ", b"SW", 1, 0, 64, 400 * MIB)


def experts(tensor: torch.Tensor) -> ExpertsRequest:
    rows = torch.zeros(len(tensor), dtype=torch.int32)
    return ExpertsRequest(version="v", block=0, experts=(0,), counts=(len(tensor),), hidden=tensor[:1], rows=rows)


@pytest.mark.parametrize(
    "request_",
    [
        None,
        InfoRequest(),
        EchoRequest(payload=torch.zeros(1 << 18, dtype=torch.uint8)),
        AdapterUpload(digest="d", spec=AdapterSpec(modules=()), tensors=()),
        FORWARD,
        SessionStep(hidden=HIDDEN, cached_tokens=0),
        BackwardRequest(ticket="t", grad_hidden=HIDDEN),
        experts(HIDDEN[0]),
        NormsRequest(digest="d", num_bytes=1 << 20),
    ],
    ids=lambda one: type(one).__name__,
)
@both_loops
async def test_an_answer_of_400_mib_is_refused_at_its_header(request_: Message | None) -> None:
    ledger = Ledger(1 << 30)
    async with stream_and_socket(budget=ledger, allowances=Allowances()) as (stream, far):
        if request_ is not None:
            stream._allowances.asked(request_)  # type: ignore[union-attr]
        far.send(HUGE)
        with pytest.raises(ProtocolError, match="an answer of 419430464 bytes declared"):
            await stream.receive(timeout_s=5.0)
        assert ledger.used == 0


@both_loops
async def test_what_is_pushed_is_refused_in_a_few_words() -> None:
    """Nothing is read from such a stream: whatever comes stays in memory, once for each stream to that peer."""
    ledger = Ledger(1 << 30)
    refusal = Failure(kind="refused", message="x" * 1000)
    async with stream_and_socket(budget=ledger, allowances=Allowances()) as (stream, far):
        stream._allowances.asked(PushedHidden(session="s", step=0, hidden=HIDDEN))  # type: ignore[union-attr]
        far.send(b"".join(encode(refusal)))
        assert await stream.receive(timeout_s=5.0) == refusal
        far.send(b"".join(encode(Failure(kind="refused", message="x" * (1 << 17)))))
        with pytest.raises(ProtocolError, match="at most 65536"):
            await stream.receive(timeout_s=5.0)
        assert ledger.used == 0


@pytest.mark.parametrize("codec", ["none", "rotated8"])
@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (FORWARD, ForwardResponse(hidden=HIDDEN)),
        (
            ForwardRequest(version="v", start=0, end=3, hidden=HIDDEN, collect_hidden=True),
            ForwardResponse(hidden=HIDDEN, hidden_states=(HIDDEN, HIDDEN)),
        ),
        (SessionStep(hidden=HIDDEN.half(), cached_tokens=0), SessionStepResponse(hidden=HIDDEN.half())),
        (BackwardRequest(ticket="t", grad_hidden=HIDDEN), BackwardResponse(grad_hidden=HIDDEN)),
        (
            BackwardRequest(ticket="t", grad_hidden=HIDDEN[:, :1], needs_adapters=True),
            BackwardResponse(grad_hidden=HIDDEN[:, :1], grad_adapters=(HIDDEN, HIDDEN)),
        ),
        (OpenRequest(states=(0, 1, 2)), OpenedStates(states=(HIDDEN,) * 3)),
        (EchoRequest(payload=HIDDEN[0].view(torch.uint8)), EchoResponse(payload=HIDDEN[0].view(torch.uint8))),
        (experts(HIDDEN[0]), ExpertsResponse(rows=HIDDEN[0])),
        (NormsRequest(digest="d", num_bytes=HIDDEN.nbytes), NormsResponse(norms=tuple(HIDDEN.flatten(1)))),
        (FORWARD, Failure(kind="internal", message="x" * 1000)),
    ],
    ids=lambda one: type(one).__name__,
)
@both_loops
async def test_what_was_asked_for_is_received(request_: Message, answer: Message, codec: str) -> None:
    async with stream_and_socket(allowances=Allowances()) as (stream, far):
        stream._allowances.asked(request_)  # type: ignore[union-attr]
        far.setblocking(True)
        sending = stream._loop.run_in_executor(None, far.sendall, b"".join(encode(answer, codec=codec)))  # type: ignore[arg-type]
        assert type(await stream.receive(timeout_s=20.0)) is type(answer)
        await sending


@both_loops
async def test_a_small_answer_does_not_unpack_to_a_large_one() -> None:
    async with stream_and_socket(allowances=Allowances()) as (stream, far):
        stream._allowances.asked(InfoRequest())  # type: ignore[union-attr]
        far.setblocking(True)
        # 0.5 MiB on the wire, 3 MiB more when they are unpacked.
        packed = b"".join(encode(ForwardResponse(hidden=HIDDEN.bfloat16()), codec="rotated8"))
        sending = stream._loop.run_in_executor(None, far.sendall, packed)
        with pytest.raises(ProtocolError, match="unpacks to far more than the 0 bytes"):
            await stream.receive(timeout_s=20.0)
        await sending


@both_loops
async def test_what_a_server_sends_unasked_is_bounded_too() -> None:
    ledger = Ledger(1 << 30)
    async with stream_and_socket(budget=ledger, allowances=Allowances()) as (stream, far):
        await stream.send(InfoRequest())
        far.send(b"".join(encode(Failure(kind="internal", message="x"))))
        assert isinstance(await stream.receive(timeout_s=5.0), Failure)
        # The request has been answered.
        far.send(struct.pack("<2sBBIQ", b"SW", 1, 0, 64, 4 * MIB))
        with pytest.raises(ProtocolError, match="an answer of 4194368 bytes declared"):
            await stream.receive(timeout_s=5.0)
        assert ledger.used == 0
