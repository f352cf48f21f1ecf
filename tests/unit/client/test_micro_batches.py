"""Chunks of a batch are under way at once, and one failure of a server stays one, however many chunks it had.

Each server takes a second for a chunk, in the time of the loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import virtual_time
from client_kit import VERSION, server_info
from torch import Tensor

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec
from swarm_plugins.block_io import AdapterUse, LoadedAdapter, SpanInputs, SpanOutputs
from swarm_plugins.client.config import SwarmConfig
from swarm_plugins.client.discovery.view import Servers, SwarmView
from swarm_plugins.client.peers import Peers
from swarm_plugins.client.queues import MOST_AT_ONCE
from swarm_plugins.client.training.micro_batches import BatchCall
from swarm_plugins.errors import ConfigError, MissingBlocksError, RemoteError, UnsupportedError
from swarm_plugins.testing.transports import LocalTransport
from swarm_plugins.transport.channel import Channel
from swarm_plugins.transport.messages import (
    AdapterStored,
    AdapterUpload,
    BackwardRequest,
    BackwardResponse,
    Failure,
    FailureKind,
    ForwardRequest,
    ForwardResponse,
    Message,
)
from swarm_plugins.transport.server_info import ServerInfo

STEP_S = 1.0
Fails = Callable[[Message], FailureKind | None]


class Stage:
    """A server that computes one request after another; its blocks multiply by two, and by its adapter's first value.

    Args:
        start: First block.
        end: One past the last.
    """

    def __init__(self, start: int, end: int, **figures: Any) -> None:
        self.blocks = range(start, end)
        self.figures = {"throughput": 2.0 / STEP_S, **figures}
        self.fails: Fails = lambda _: None
        self.is_dead = False
        self.dies_at: int | None = None
        """The number of a request after which it is dead."""
        self.seen: list[Message] = []
        self.tokens_now = 0
        self.most_tokens = 0
        self.tickets: dict[str, float] = {}
        self.adapters: dict[str, float] = {}
        self.row_s = 0.0
        """What a row takes, instead of a second for any number."""
        self.most_kept = 1000
        """Rows of the largest graph that it keeps."""
        self._lock = asyncio.Lock()
        self._numbers = itertools.count()

    def info(self, num_blocks: int) -> ServerInfo:
        return server_info(self.blocks.start, self.blocks.stop, num_blocks, **self.figures)

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.seen)

    async def handle(self, channel: Channel) -> None:
        while (message := await channel.receive(timeout_s=1000.0)) is not None:
            self.seen.append(message)
            tokens = message.hidden.shape[:2].numel() if isinstance(message, ForwardRequest) else 0
            self.tokens_now += tokens
            self.most_tokens = max(self.most_tokens, self.tokens_now)
            kind = self.fails(message)
            try:
                if kind is None:
                    async with self._lock:
                        await asyncio.sleep(self.row_s * _rows(message) or STEP_S)
                    self.is_dead |= self.dies_at is not None and len(self.seen) > self.dies_at
            finally:
                self.tokens_now -= tokens
            if self.is_dead:
                return
            await channel.send(self._answer(message) if kind is None else Failure(kind=kind, message="no"))

    def _answer(self, message: Message) -> Message:
        if isinstance(message, AdapterUpload):
            self.adapters[message.digest] = message.tensors[0].flatten()[0].item()
            return AdapterStored(digest=message.digest)
        if isinstance(message, ForwardRequest):
            if not set(message.adapters) <= set(self.adapters):
                return Failure(kind="unknown_adapter", message="upload it")
            is_kept = message.keep and _rows(message) <= self.most_kept
            ticket = f"{next(self._numbers)}" if is_kept else None
            self.tickets[ticket or ""] = self._factor(message)
            return ForwardResponse(hidden=message.hidden * self._factor(message), ticket=ticket)
        assert isinstance(message, BackwardRequest)
        if message.ticket is None:
            assert message.forward is not None
            factor: float | None = self._factor(message.forward)
        else:
            factor = self.tickets.pop(message.ticket, None)
        if factor is None:
            return Failure(kind="unknown_ticket", message="gone")
        grads = (message.grad_hidden.sum().reshape(1, 1),) if message.needs_adapters else ()
        return BackwardResponse(grad_hidden=message.grad_hidden * factor, grad_adapters=grads)

    def _factor(self, message: ForwardRequest) -> float:
        factor = 2.0 ** (message.end - message.start)
        for digest in message.adapters:
            factor *= self.adapters[digest]
        return factor


def _rows(message: Message) -> int:
    if isinstance(message, ForwardRequest):
        return message.hidden.shape[0]
    return message.grad_hidden.shape[0] if isinstance(message, BackwardRequest) else 0


Use = Callable[[Servers, LocalTransport], Awaitable[float]]


def run(stages: dict[str, Stage], use: Use, *, num_blocks: int = 3, **config: Any) -> float:
    """Returns what a coroutine returns that uses servers."""

    async def main() -> float:
        handlers = {}
        for peer, stage in stages.items():

            async def tell(channel: Channel, stage: Stage = stage) -> None:
                while await channel.receive(timeout_s=1000.0) is not None and not stage.is_dead:
                    await channel.send(stage.info(num_blocks))

            rpcs = ("rpc_forward", "rpc_backward", "rpc_adapter")
            handlers[peer] = {"rpc_info": tell, **dict.fromkeys(rpcs, stage.handle)}
        transport = LocalTransport(handlers)
        settings = SwarmConfig(**config)
        peers = Peers(transport, settings)
        view = SwarmView(transport, peers, settings, version=VERSION, num_blocks=num_blocks)
        try:
            return await use(Servers(peers, view), transport)
        finally:
            await peers.close()
            await transport.close()

    return virtual_time.run(main(), timeout_s=1000)


def three() -> dict[str, Stage]:
    return {peer: Stage(index, index + 1) for index, peer in enumerate("abc")}


def batch(rows: int = 8, length: int = 2) -> SpanInputs:
    return SpanInputs(blocks=range(3), hidden=torch.arange(float(rows * length * 4)).reshape(rows, length, 4))


async def backward(call: BatchCall) -> Tensor:
    grads = SpanOutputs(hidden=call.inputs.hidden.clone())
    hidden = (await call.backward(grads, needs_hidden=True, needs=()))[0]
    assert hidden is not None
    return hidden


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
def test_a_server_lost_in_the_middle_is_one_failure_of_each_pass(dies_at: int, failures: int) -> None:
    stages = {**three(), "spare": Stage(1, 2, throughput=0.01)}
    stages["b"].dies_at = dies_at

    async def use(servers: Servers, _: LocalTransport) -> float:
        call = BatchCall(servers, batch(), keep=True)
        assert torch.equal((await call.forward()).hidden, 8 * call.inputs.hidden)
        assert torch.equal(await backward(call), 8 * call.inputs.hidden)
        assert [*servers.view.bans._failures] == ["b"]
        return servers.view.bans._failures["b"].strikes

    assert run(stages, use, micro_batches=8, max_retries=1) == failures
    assert stages["spare"].count(BackwardRequest) > 0


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
        return len(servers.view.bans.banned())

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
        return len(servers.view.bans.banned())

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
        return len(servers.view.bans.banned())

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


def steps(stages: dict[str, Stage], num_steps: int) -> list[list[int]]:
    """Returns the rows of each request that each of some training steps has made, of all servers."""
    asked: list[list[int]] = []

    async def use(servers: Servers, _: LocalTransport) -> float:
        for _step in range(num_steps):
            before = {peer: len(stage.seen) for peer, stage in stages.items()}
            call = BatchCall(servers, batch(length=20), keep=True)
            assert torch.equal((await call.forward()).hidden, 8 * call.inputs.hidden)
            assert torch.equal(await backward(call), 8 * call.inputs.hidden)
            new = [message for peer, stage in stages.items() for message in stage.seen[before[peer] :]]
            asked.append([_rows(message) for message in new if isinstance(message, ForwardRequest)])
        return 0.0

    run(stages, use)
    return asked


def test_the_number_of_chunks_follows_from_what_servers_took() -> None:
    stages = three()
    for stage in stages.values():
        stage.row_s = 1.0
    asked = steps(stages, 10)
    assert asked[0] == asked[7] == [8, 8, 8]
    assert asked[8] == asked[9] == [1] * 24


def test_fast_servers_get_whole_batches() -> None:
    stages = three()
    for stage in stages.values():
        stage.row_s = 0.002
    assert steps(stages, 12)[-1] == [8, 8, 8]


def test_servers_with_the_same_blocks_share_a_batch_by_their_speed() -> None:
    stages = {"fast": Stage(0, 3, throughput=20.0), "slow": Stage(0, 3, throughput=20.0 / 3)}
    stages["fast"].row_s, stages["slow"].row_s = 3.0, 9.0
    asked = steps(stages, 12)
    assert asked[:8] == [[8]] * 8
    assert asked[8:] == [[2] * 4] * 4
    assert [stage.count(ForwardRequest) for stage in stages.values()] == [8 + 3 * 4, 4]


def test_chunks_become_so_small_that_a_server_keeps_their_graphs() -> None:
    stages = {"a": Stage(0, 3)}
    stages["a"].row_s, stages["a"].most_kept = 0.001, 3
    assert steps(stages, 4) == [[8], [4, 4], [2] * 4, [2] * 4]
    # One that keeps nothing at all gets whole batches.
    none = {"a": Stage(0, 3)}
    none["a"].row_s, none["a"].most_kept = 0.001, 0
    assert steps(none, 6)[-1] == [8]


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "many", True])
def test_a_setting_that_counts_nothing(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"invalid micro_batches .*: expected 'auto' or a whole number, 1 or more"):
        SwarmConfig(micro_batches=wrong)
