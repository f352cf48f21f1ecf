"""Requests that take long: others get their turns meanwhile, and what they hold is bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from fake_server import VERSION, WIDTH, FakeRunner, playing, until

from swarm_plugins.adapter_spec import AdapterSpec, PeftLayer, PeftPart, adapter_digest
from swarm_plugins.block_io import LoadedAdapter, SpanInputs, SpanOutputs
from swarm_plugins.blocks.adapters.norms import NormedLayer
from swarm_plugins.server.compute.work import Parts
from swarm_plugins.server.rpc.training import cut
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.cutting import RunLimits, cut_batch
from swarm_plugins.transport.messages import (
    AdapterStored,
    AdapterUpload,
    BackwardRequest,
    BackwardResponse,
    ForwardRequest,
    ForwardResponse,
    Message,
    NormsRequest,
    NormsResponse,
)

FORWARD = ForwardRequest(version=VERSION, start=2, end=6, hidden=torch.ones(1, 1, WIDTH))
ROWS = 64


class Watched:
    """Notes the rows of each forward of the runner; the first one waits."""

    def __init__(self, runner: FakeRunner) -> None:
        self.rows: list[int] = []
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self._forward = runner.forward
        runner.forward = self.forward  # type: ignore[method-assign]

    def forward(self, inputs: SpanInputs) -> SpanOutputs:
        self.rows.append(inputs.hidden.shape[0])
        self.begun.set()
        self.may_go_on.wait(30.0)
        return self._forward(inputs)


@pytest.mark.parametrize("kind", ["forward", "backward", "kept"])
async def test_a_batch_of_many_rows_lets_others_train_between_its_portions(
    service: Service, runner: FakeRunner, kind: str
) -> None:
    service.run_limits = RunLimits(portion_tokens=5)
    watched = Watched(runner)
    many = msgspec.structs.replace(FORWARD, hidden=torch.ones(ROWS, 1, WIDTH), keep=kind == "kept")
    grad = torch.ones_like(many.hidden)
    asked: tuple[str, Message] = ("rpc_forward", many)
    if kind == "backward":
        asked = ("rpc_backward", BackwardRequest(forward=many, grad_hidden=grad))
    async with playing(service, client="mallory") as mallory, playing(service, client="honest") as honest:
        long = asyncio.create_task(mallory(*asked))
        await until(watched.begun.is_set)
        short = asyncio.create_task(honest("rpc_forward", FORWARD))
        await until(lambda: service.scheduler.num_waiting == 2)
        watched.may_go_on.set()
        answers = await asyncio.gather(short, long)
        wanted = BackwardResponse if kind == "backward" else ForwardResponse
        assert [type(one) for one in answers] == [ForwardResponse, wanted]
        # One portion ran when the honest one came; its own is the only one of a single row.
        assert watched.rows.index(1) <= 2
        assert sum(watched.rows) == ROWS + 1
        if kind == "kept":
            ticket = answers[1].ticket  # type: ignore[union-attr]
            back = await mallory("rpc_backward", BackwardRequest(ticket=ticket, grad_hidden=grad))
            assert isinstance(back, BackwardResponse)
            assert torch.equal(back.grad_hidden, torch.full_like(grad, 3.0 * 4 * 5 * 6))


async def test_graphs_of_portions_do_not_outgrow_the_budget_together(service: Service, runner: FakeRunner) -> None:
    """Requests in parts run side by side: each might otherwise make as many graphs as all may keep."""
    service.run_limits = RunLimits(portion_tokens=5)
    service.activations.budget_bytes = 10_000
    most = 0
    forward = runner.forward

    def watching(inputs: SpanInputs) -> SpanOutputs:
        nonlocal most
        most = max(most, service.activations.used_bytes)
        return forward(inputs)

    runner.forward = watching  # type: ignore[method-assign]
    many = msgspec.structs.replace(FORWARD, hidden=torch.ones(ROWS, 1, WIDTH), keep=True)
    async with playing(service, client="a") as one, playing(service, client="b") as other:
        await asyncio.gather(one("rpc_forward", many), other("rpc_forward", many))
    assert 0 < most <= 10_000


async def test_what_a_long_row_holds_is_charged(service: Service) -> None:
    """It holds keys, values and states while other requests run."""
    service.run_limits = RunLimits(portion_tokens=5)
    row = SpanInputs(blocks=range(2, 6), hidden=torch.ones(1, 64, WIDTH))
    (portion,) = cut_batch(row, service.spec, service.run_limits)
    assert portion.part_tokens is not None
    assert portion.held_bytes == 64 * WIDTH * 4 * (4 + 4) + 2 * 64 * service.spec.kv_token_bytes
    with service.ledger.charge("alice") as charge:
        before = service.ledger.used
        cut(service, row, charge)
        assert service.ledger.used - before == portion.held_bytes


def built_upload() -> AdapterUpload:
    """Returns an adapter whose layer a server builds."""
    layer = PeftLayer(block=2, module="q", options=(), names=("a",), places=(0,), scaling=1.0)
    spec = AdapterSpec(modules=(), peft=PeftPart(method="LOHA", shapes=((2,),), layers=(layer,)))
    tensors = (torch.ones(2),)
    return AdapterUpload(digest=adapter_digest(spec, tensors), spec=spec, tensors=tensors)


async def test_layers_are_built_when_it_is_their_turn_on_the_compute_thread(
    service: Service, runner: FakeRunner
) -> None:
    """In threads of their own, 24 uploads held up everybody's steps."""
    threads: list[str] = []
    check = runner.check_adapter

    def checked(*args: Any) -> LoadedAdapter:
        threads.append(threading.current_thread().name)
        return check(*args)

    runner.check_adapter = checked  # type: ignore[method-assign]

    async def upload(peer: str) -> Message:
        async with playing(service, client=peer) as ask:
            return await ask("rpc_adapter", built_upload())

    answers = await asyncio.gather(*(upload(f"peer {number}") for number in range(6)))
    assert all(isinstance(answer, AdapterStored) for answer in answers)
    assert threads == ["swarm-compute"] * 6


async def test_others_compute_between_the_layers_of_an_upload(service: Service, runner: FakeRunner) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    check = runner.checking_adapter

    def checking(*args: Any) -> Parts[LoadedAdapter]:
        for _ in range(4):
            runner.events.append("layer")
            begun.set()
            may_go_on.wait(30.0)
            yield
        return (yield from check(*args))

    runner.checking_adapter = checking  # type: ignore[method-assign]
    async with playing(service, client="mallory") as mallory, playing(service, client="honest") as honest:
        upload = asyncio.create_task(mallory("rpc_adapter", built_upload()))
        await until(begun.is_set)
        short = asyncio.create_task(honest("rpc_forward", FORWARD))
        await until(lambda: service.scheduler.num_waiting == 2)
        may_go_on.set()
        answers = await asyncio.gather(upload, short)
    assert [type(answer) for answer in answers] == [AdapterStored, ForwardResponse]
    assert runner.events.index("block 5") < len(runner.events) - 1
    assert runner.events.count("layer") == 4


async def test_norms_are_counted_before_they_are_made_and_others_compute_between_them(
    service: Service, runner: FakeRunner
) -> None:
    """Layers that share their factors have norms that are larger than the adapter."""
    begun, may_go_on = threading.Event(), threading.Event()
    weight_norms = runner.weight_norms
    claimed: list[int] = []

    def computing(layers: Sequence[NormedLayer]) -> Parts[tuple[torch.Tensor, ...]]:
        claimed.append(service.ledger.held("mallory"))
        begun.set()
        may_go_on.wait(30.0)
        return (yield from weight_norms(layers))

    runner.weight_norms = computing  # type: ignore[method-assign]
    options, names = (("use_dora", True),), ("lora_A.weight", "lora_B.weight")
    layers = tuple(
        PeftLayer(block=block, module="q", options=options, names=names, places=(0, 1)) for block in range(2, 6)
    )
    part = PeftPart(method="LORA", shapes=((1, 2), (500, 1)), layers=layers)
    spec, tensors = AdapterSpec(modules=(), peft=part), (torch.ones(1, 2), torch.ones(500, 1))
    digest = adapter_digest(spec, tensors)
    async with playing(service, client="mallory") as mallory, playing(service, client="honest") as honest:
        await mallory("rpc_adapter", AdapterUpload(digest=digest, spec=spec, tensors=tensors))
        long = asyncio.create_task(mallory("rpc_adapter", NormsRequest(digest=digest, num_bytes=8000)))
        await until(begun.is_set)
        short = asyncio.create_task(honest("rpc_forward", FORWARD))
        await until(lambda: service.scheduler.num_waiting == 2)
        may_go_on.set()
        answer, _ = await asyncio.gather(long, short)
    assert isinstance(answer, NormsResponse)
    assert [len(norm) for norm in answer.norms] == [500] * 4
    assert claimed[0] >= 4 * 500 * 4
    assert runner.events.index("block 5") < runner.events.index("norm of block 5")


async def test_a_forward_whose_graphs_are_too_large_together_has_no_ticket(service: Service) -> None:
    """A ticket for some of its portions would give gradients of some of its rows."""
    service.run_limits = RunLimits(portion_tokens=5)
    many = msgspec.structs.replace(FORWARD, hidden=torch.ones(ROWS, 1, WIDTH), keep=True)
    async with playing(service) as ask:
        whole = await ask("rpc_forward", many)
        assert isinstance(whole, ForwardResponse)
        assert whole.ticket is not None
        service.activations.budget_bytes = service.activations.used_bytes - 1
        service.activations.clear()
        answer = await ask("rpc_forward", many)
        assert isinstance(answer, ForwardResponse)
        assert answer.ticket is None
        assert len(service.activations) == 0


async def test_abandoned_requests_hold_nothing_while_they_would_wait(service: Service, runner: FakeRunner) -> None:
    watched = Watched(runner)
    scheduler = service.scheduler
    closed = threading.Event()

    def waiting() -> Parts[None]:
        try:
            yield
        finally:
            closed.set()

    async with playing(service, client="mallory") as mallory:
        long = asyncio.create_task(mallory("rpc_forward", FORWARD))
        await until(watched.begun.is_set)
        gone = waiting()
        next(gone)  # as after a first part
        task = asyncio.create_task(scheduler.train(gone, timeout_s=30, peer="mallory"))
        await until(lambda: scheduler.num_waiting == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        watched.may_go_on.set()
        await long
        await scheduler.call(lambda: None, timeout_s=30)
        assert closed.wait(30.0)
