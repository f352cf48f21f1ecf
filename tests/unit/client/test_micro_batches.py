"""Chunks of a batch are under way at once, and one failure of a server stays one, however many chunks it had.

Each server takes a second for a chunk, in the time of the loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from stage_kit import Stage, backward, batch, run, three
from torch import Tensor

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec
from swarm_plugins.block_io import AdapterUse, LoadedAdapter, SpanInputs, SpanOutputs
from swarm_plugins.book.backlog import MOST_AT_ONCE
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.servers import Servers
from swarm_plugins.client.training.batch import BatchCall
from swarm_plugins.errors import CapacityError, ConfigError, MissingBlocksError, RemoteError, UnsupportedError
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.messages import (
    AdapterUpload,
    BackwardRequest,
    FailureKind,
    ForwardRequest,
    Message,
)


@pytest.mark.parametrize(("chunks", "steps"), [(1, 3), (2, 4), (8, 10)])
def test_servers_work_at_the_same_time(chunks: int, steps: int) -> None:
    async def use(servers: Servers, _: LocalTransport) -> float:
        loop = asyncio.get_running_loop()
        await servers.view.refresh(force=True)
        started = loop.time()
        call = BatchCall(servers, batch(), keep=True)
        assert torch.equal((await call.forward()).hidden, 8 * call.inputs.hidden)
        middle = loop.time()
        assert torch.equal(await backward(call), 8 * call.inputs.hidden)
        assert loop.time() - middle == pytest.approx(steps, abs=0.1)
        return middle - started

    stages = three()
    assert run(stages, use, micro_batches=chunks) == pytest.approx(steps, abs=0.1)
    for stage in stages.values():
        assert stage.count(ForwardRequest) == stage.count(BackwardRequest) == chunks


@pytest.mark.parametrize(
    ("dies_at", "failures"), [pytest.param(4, 2, id="forward"), pytest.param(11, 1, id="backward")]
)
def test_a_server_lost_in_the_middle_is_one_failure_of_each_pass(
    dies_at: int, failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    stages = {**three(), "spare": Stage(1, 2, throughput=0.01)}
    stages["b"].dies_at = dies_at

    async def use(servers: Servers, _: LocalTransport) -> float:
        call = BatchCall(servers, batch(), keep=True)
        assert torch.equal((await call.forward()).hidden, 8 * call.inputs.hidden)
        assert torch.equal(await backward(call), 8 * call.inputs.hidden)
        records = servers.peers.book.records()
        assert [peer for peer, record in records.items() if record.num_strikes] == ["b"]
        return records["b"].num_strikes

    assert run(stages, use, micro_batches=8, max_retries=1) == failures
    assert stages["spare"].count(BackwardRequest) > 0
    assert "server b failed (its first failure does not count): " in caplog.text


def test_the_only_holder_that_fails_once_counts_once() -> None:
    stages = three()
    failed: list[Message] = []

    def fails(message: Message) -> FailureKind | None:
        failed.append(message)
        return "internal" if len(failed) <= 4 else None

    async def use(servers: Servers, _: LocalTransport) -> float:
        call = BatchCall(servers, batch(), keep=True)
        return (await call.forward()).hidden.sum().item()

    stages["a"].fails = fails
    assert run(stages, use, micro_batches=4, max_retries=2) == 8 * batch().hidden.sum()


def test_without_servers_all_chunks_end_with_one_error() -> None:
    stages = three()

    async def use(servers: Servers, transport: LocalTransport) -> float:
        call = BatchCall(servers, batch(), keep=True)
        await call.forward()
        await transport.kill("b")
        with pytest.raises(MissingBlocksError, match=r"no living server holds blocks 1"):
            await backward(call)
        return len([task for task in asyncio.all_tasks() if "ChainCall" in repr(task.get_coro())])

    assert run(stages, use, micro_batches=8, max_retries=2) == 0


def test_an_evicted_graph_is_computed_again_where_it_was() -> None:
    stages = three()

    async def use(servers: Servers, _: LocalTransport) -> float:
        call = BatchCall(servers, batch(), keep=True)
        await call.forward()
        for ticket in list(stages["b"].tickets)[:3]:
            del stages["b"].tickets[ticket]
        assert torch.equal(await backward(call), 8 * call.inputs.hidden)
        return len(servers.view.banned())

    assert run(stages, use, micro_batches=8) == 0
    sent = [message for message in stages["b"].seen if isinstance(message, BackwardRequest)]
    assert len([one for one in sent if one.ticket is None]) == 3


def with_adapter(inputs: SpanInputs, weight: Tensor) -> SpanInputs:
    spec = AdapterSpec(
        modules=tuple(AdapterModule(block=block, module="mlp", kind="ia3", shapes=((1, 1),)) for block in inputs.blocks)
    )
    adapter = LoadedAdapter(spec=spec, tensors=tuple(weight[block] for block in inputs.blocks))
    return replace(inputs, adapters=AdapterUse(adapters=(adapter,)))


def test_an_adapter_is_sent_once_however_many_chunks_use_it() -> None:
    stages = three()
    weight = torch.tensor([3.0, 5.0, 7.0]).reshape(3, 1, 1)

    async def use(servers: Servers, _: LocalTransport) -> float:
        call = BatchCall(servers, with_adapter(batch(), weight), keep=True)
        assert torch.equal((await call.forward()).hidden, 8 * 105 * call.inputs.hidden)
        for stage in stages.values():
            # It makes room; all chunks of the next batch find out at the same time.
            stage.adapters.clear()
        assert torch.equal((await call.forward()).hidden, 8 * 105 * call.inputs.hidden)
        _, *found = await call.backward(
            SpanOutputs(hidden=call.inputs.hidden.clone()), needs_hidden=True, needs=[True] * 3
        )
        grad = found[0]
        assert grad is not None
        return grad.item()

    # a gets the gradient of its output: 4 x 35 times that of the last output.
    assert run(stages, use, micro_batches=8) == pytest.approx(4 * 35 * batch().hidden.sum().item())
    assert [stage.count(AdapterUpload) for stage in stages.values()] == [2, 2, 2]


def test_an_upload_that_fails_fails_for_all_chunks_at_once() -> None:
    stages = three()
    stages["b"].fails = lambda message: "out_of_memory" if isinstance(message, AdapterUpload) else None

    async def use(servers: Servers, _: LocalTransport) -> float:
        call = BatchCall(servers, with_adapter(batch(), torch.ones(3, 1, 1)), keep=True)
        with pytest.raises(MemoryError, match=r"server b answered out_of_memory"):
            await call.forward()
        return 0.0

    run(stages, use, micro_batches=4)
    assert stages["b"].count(AdapterUpload) <= 4


@pytest.mark.parametrize("when", ["before a part is named", "before it is sent"])
def test_adapters_changed_between_chunks_are_refused(when: str) -> None:
    stages = three()
    weight = torch.ones(3, 1, 1)

    def change(message: Message) -> FailureKind | None:
        if isinstance(message, ForwardRequest) and when == "before a part is named":
            weight[2] += 1.0
        if isinstance(message, AdapterUpload) and when == "before it is sent":
            weight[0] += 1.0
            return "bad_request"  # as servers do: its content is not what its name says
        return None

    stages["a"].fails = change

    async def use(servers: Servers, _: LocalTransport) -> float:
        call = BatchCall(servers, with_adapter(batch(), weight), keep=True)
        with pytest.raises(UnsupportedError, match=r"an adapter was changed while .* was under way: change .* between"):
            await call.forward()
        return len(servers.view.banned())

    assert run(stages, use, micro_batches=2) == 0


def test_a_server_without_places_for_all_chunks_gets_them_one_after_another() -> None:
    stages = three()

    def fails(_: Message) -> FailureKind | None:
        return "overloaded" if stages["b"].tokens_now > 2 * 2 else None

    stages["b"].fails = fails
    stages["a"].figures["max_batch_tokens"] = 6

    async def use(servers: Servers, _: LocalTransport) -> float:
        call = BatchCall(servers, batch(), keep=True)
        assert torch.equal((await call.forward()).hidden, 8 * call.inputs.hidden)
        return len(servers.view.banned())

    assert run(stages, use, micro_batches=8, min_batch_tokens=1) == 0
    # It takes 6 tokens in one request, so not more in several.
    assert stages["a"].most_tokens == 6


def test_an_overload_by_others_is_an_error_in_the_end() -> None:
    stages = three()
    stages["b"].fails = lambda _: "overloaded"

    async def use(servers: Servers, _: LocalTransport) -> float:
        with pytest.raises(RemoteError, match="overloaded"):
            await BatchCall(servers, batch(), keep=True).forward()
        return 0.0

    run(stages, use, micro_batches=8, max_retries=0)


@pytest.mark.parametrize("num_refused", [12, 10**9])
def test_a_server_that_is_busy_for_a_while_is_not_at_fault(num_refused: int) -> None:
    stages = three()
    stages["b"].fails = lambda _: "overloaded" if len(stages["b"].seen) <= num_refused else None

    async def use(servers: Servers, _: LocalTransport) -> float:
        call = BatchCall(servers, batch(), keep=True)
        if num_refused == 12:
            assert torch.equal((await call.forward()).hidden, 8 * call.inputs.hidden)
        else:
            with pytest.raises(RemoteError, match="overloaded"):
                await call.forward()
        return len(servers.view.banned())

    assert run(stages, use, micro_batches=1) == 0


@pytest.mark.parametrize("num_adapters", [1, 2])
def test_adapters_that_a_server_cannot_hold_at_once_are_no_fault_of_its_own(num_adapters: int) -> None:
    stages = three()
    stages["b"].fails = lambda message: "unknown_adapter" if isinstance(message, ForwardRequest) else None

    async def use(servers: Servers, _: LocalTransport) -> float:
        one, other = (with_adapter(batch(), torch.full((3, 1, 1), value)).adapters.adapters for value in (1.0, 2.0))
        used = AdapterUse(adapters=(*one, *other)[:num_adapters])
        call = BatchCall(servers, replace(batch(), adapters=used), keep=True)
        says = rf"dropped an adapter twice during one request \({num_adapters} adapters, {4 * num_adapters} bytes\)"
        with pytest.raises(CapacityError, match=says):
            await call.forward()
        return len(servers.view.banned())

    assert run(stages, use, micro_batches=1) == 0
    assert stages["b"].count(AdapterUpload) == 2 * num_adapters


@pytest.mark.parametrize("wanted", [9, 10**9])
def test_no_more_chunks_than_rows(wanted: int) -> None:
    stages = three()

    async def use(servers: Servers, _: LocalTransport) -> float:
        return (await BatchCall(servers, batch(4), keep=False).forward()).hidden.sum().item()

    assert run(stages, use, micro_batches=wanted) == 8 * batch(4).hidden.sum()
    assert stages["a"].count(ForwardRequest) == 4


def test_a_server_has_only_so_many_chunks_at_once() -> None:
    stages = three()

    async def use(servers: Servers, _: LocalTransport) -> float:
        return (await BatchCall(servers, batch(3 * MOST_AT_ONCE), keep=False).forward()).hidden.sum().item()

    run(stages, use, micro_batches=3 * MOST_AT_ONCE)
    assert stages["a"].most_tokens == MOST_AT_ONCE * 2


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "many", True])
def test_a_setting_that_counts_nothing(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"invalid micro_batches .*: expected 'auto' or a whole number, 1 or more"):
        SwarmConfig(micro_batches=wrong)
