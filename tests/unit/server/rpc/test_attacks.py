"""Small messages with which a client tries to make a server work or remember without bound."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from fake_server import MAX_POSITIONS, VERSION, WIDTH, FakeCache, FakeRunner
from fake_server import playing as playing_all

from swarm_plugins.adapter_spec import AdapterModule, AdapterSpec, PeftLayer, PeftPart, adapter_digest
from swarm_plugins.block_io import CacheOp, LoadedAdapter
from swarm_plugins.errors import CapacityError
from swarm_plugins.server import limits
from swarm_plugins.server.failures import RequestError
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.adapter_store import MAX_ADAPTERS, AdapterStore
from swarm_plugins.server.state.cutting import RunLimits
from swarm_plugins.server.state.sessions import MAX_OPS, apply_ops, shape_after
from swarm_plugins.transport.messages import (
    AdapterStored,
    AdapterUpload,
    BackwardRequest,
    Failure,
    ForwardRequest,
    ForwardResponse,
    Message,
    SessionOpen,
    SessionStep,
    SessionStepResponse,
)

HIDDEN = torch.ones(1, 1, WIDTH)
OPEN = SessionOpen(version=VERSION, start=2, end=6, batch_size=1)
SWAP = CacheOp(kind="reorder", indices=(1, 0))

Ask = Callable[[Message], Awaitable[Message]]


@contextlib.asynccontextmanager
async def playing(service: Service, rpc: str) -> AsyncIterator[Ask]:
    async with playing_all(service) as ask:
        yield partial(ask, rpc)


async def test_rows_cannot_explode_between_two_operations(service: Service) -> None:
    async with playing(service, "rpc_session") as ask:
        await ask(OPEN)
        assert isinstance(await ask(SessionStep(hidden=HIDDEN, cached_tokens=0)), SessionStepResponse)
        # In the end there is one row, as the step says; a list of rows that no machine could hold lies between.
        ops = (CacheOp(kind="repeat", indices=(10**15,)), CacheOp(kind="select", indices=(0,)))
        answer = await ask(SessionStep(hidden=HIDDEN, cached_tokens=1, ops=ops))
        assert isinstance(answer, Failure)
        assert answer.kind == "bad_request"
        assert "makes 1000000000000000 rows, the limit is 256" in answer.message
        assert isinstance(await ask(SessionStep(hidden=HIDDEN, cached_tokens=1)), SessionStepResponse)


async def test_number_of_operations_is_bounded(service: Service) -> None:
    async with playing(service, "rpc_session") as ask:
        await ask(SessionOpen(version=VERSION, start=2, end=6, batch_size=2))
        step = SessionStep(hidden=torch.ones(2, 1, WIDTH), cached_tokens=0, ops=(SWAP,) * (MAX_OPS + 1))
        answer = await ask(step)
        assert isinstance(answer, Failure)
        assert f"{MAX_OPS + 1} cache operations in one step, the limit is {MAX_OPS}" in answer.message


def test_operations_handle_a_bounded_number_of_rows() -> None:
    """A message of 7 kB could make lists of 16,384 rows 128 times, before anybody's turn."""
    grown = (CacheOp(kind="repeat", indices=(8192,)), CacheOp(kind="select", indices=(0,)))
    assert shape_after(grown * 7, 1, 0, max_rows=16_384) == (1, 0)
    with pytest.raises(RequestError, match="handle more than 65536 rows: send them with several steps"):
        shape_after(grown * 8, 1, 0, max_rows=16_384)


def test_many_operations_copy_a_cache_once(runner: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    selected: list[list[int]] = []
    monkeypatch.setattr(FakeCache, "select", lambda _, rows, new_tokens: selected.append([*rows, new_tokens]))
    cache = FakeCache(runner, 2, 9)
    ops = (SWAP, CacheOp(kind="repeat", indices=(2,)), CacheOp(kind="crop", indices=(4,)))
    apply_ops((*ops, CacheOp(kind="select", indices=(0, 2, 3)), CacheOp(kind="crop", indices=(4,))), cache, 7)
    assert selected == [[1, 0, 0, 7]]
    assert cache.length == 4
    apply_ops((SWAP, SWAP), cache, 7)
    assert len(selected) == 1


async def test_request_names_so_many_adapters(service: Service) -> None:
    async with playing(service, "rpc_forward") as ask:
        answer = await ask(
            ForwardRequest(version=VERSION, start=2, end=6, hidden=HIDDEN, adapters=("a",) * 20_000, adapter_rows=(0,))
        )
        assert isinstance(answer, Failure)
        assert (answer.kind, answer.message) == (
            "bad_request",
            f"20000 adapters in one request, the limit is {MAX_ADAPTERS}",
        )


@pytest.mark.parametrize(("num_adapters", "rows", "is_taken"), [(16, None, True), (17, None, False), (17, (3,), True)])
async def test_adapters_of_all_rows_are_few(
    service: Service, num_adapters: int, rows: tuple[int, ...] | None, *, is_taken: bool
) -> None:
    """One of a few bytes, named 256 times in a step, took 1.7 s."""
    spec = AdapterSpec(modules=())
    service.adapters.peer_bytes = 1 << 20
    async with playing(service, "rpc_adapter") as ask:
        upload = AdapterUpload(digest=adapter_digest(spec, ()), spec=spec, tensors=())
        assert isinstance(await ask(upload), AdapterStored)
    async with playing(service, "rpc_forward") as ask:
        adapters = (upload.digest,) * num_adapters
        request = ForwardRequest(version=VERSION, start=2, end=6, hidden=HIDDEN, adapters=adapters, adapter_rows=rows)
        answer = await ask(request)
        assert isinstance(answer, ForwardResponse) == is_taken
        if isinstance(answer, Failure):
            assert answer.message.startswith("17 adapters for all rows, the limit is 16: name the one of each row")


def test_large_adapter_is_not_named_again_and_again() -> None:
    store = AdapterStore(1 << 20)
    large = LoadedAdapter(digest="large", spec=AdapterSpec(modules=()), tensors=(torch.zeros(100_000),))
    small = LoadedAdapter(digest="small", spec=AdapterSpec(modules=()), tensors=())
    store.put("alice", large)
    store.put("alice", small)
    with store.using("alice", ["large", "small", "large", "small"]) as found:
        assert found == (large, small, large, small)
    with (
        pytest.raises(RequestError, match="more than once, 808192 bytes in all, the limit is 524288"),
        store.using("alice", ["large"] * 3),
    ):
        raise AssertionError


def test_tiny_adapters_do_not_pile_up() -> None:
    store = AdapterStore(1 << 16)
    for index in range(100):
        digest = f"adapter {index}"
        store.put("alice", LoadedAdapter(digest=digest, spec=AdapterSpec(modules=()), tensors=(torch.zeros(1),)))
    assert len(store._held) == 7  # half of the budget at 2 KiB for each and for its tensor


def test_layers_that_share_tensors_and_empty_tensors_count_as_objects() -> None:
    """Thousands of layers for few bytes took a hundred times what they counted for."""
    options = (("oft_block_size", 8), ("block_share", False), ("use_cayley_neumann", True))
    layers = tuple(
        PeftLayer(block=2, module=f"mlp.experts.{index}.up_proj", options=options, names=("a", "b"), places=(0, 1))
        for index in range(1000)
    )
    spec = AdapterSpec(modules=(), peft=PeftPart(method="OFT", shapes=((0,),) * 2, layers=layers))
    packed = msgspec.msgpack.encode(spec)
    store = AdapterStore(1 << 24)
    tracemalloc.start()
    try:
        spec = msgspec.msgpack.decode(packed, type=AdapterSpec)
        store.put("alice", LoadedAdapter(digest="layers", spec=spec, tensors=(torch.zeros(0),) * 2))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 1 << 19 < taken < store.used_bytes < 4 * taken
    before = store.used_bytes
    many = LoadedAdapter(digest="tensors", spec=AdapterSpec(modules=()), tensors=(torch.zeros(0),) * 1000)
    store.put("alice", many)
    assert store.used_bytes - before > 1000 << 10


async def test_kept_adapter_does_not_hold_the_message_it_came_in(service: Service) -> None:
    tensors = (torch.ones(2), torch.ones(3))
    module = AdapterModule(block=2, module="x" * 100_000, kind="lora", shapes=((2,), (3,)))
    spec = AdapterSpec(modules=(module,))
    async with playing(service, "rpc_adapter") as ask:
        upload = AdapterUpload(digest=adapter_digest(spec, tensors), spec=spec, tensors=tensors)
        assert isinstance(await ask(upload), AdapterStored)
        with service.adapters.using("alice", [upload.digest]) as (held,):
            assert [tensor.untyped_storage().nbytes() for tensor in held.tensors] == [8, 12]


async def test_an_upload_is_checked_against_the_memory_of_a_run(service: Service) -> None:
    def check(digest: str, spec: AdapterSpec, tensors: tuple[torch.Tensor, ...], run_bytes: int) -> LoadedAdapter:
        raise CapacityError(f"the limit is {run_bytes} bytes")

    spec = AdapterSpec(modules=())
    service.runner.check_adapter, service.run_limits = check, RunLimits(run_bytes=12345)
    async with playing(service, "rpc_adapter") as ask:
        answer = await ask(AdapterUpload(digest=adapter_digest(spec, ()), spec=spec, tensors=()))
        assert isinstance(answer, Failure)
        assert (answer.kind, answer.message) == ("out_of_memory", "the limit is 12345 bytes")


async def test_prefix_is_bounded_also_where_positions_are_given(service: Service) -> None:
    prefix = (torch.ones(1, 1, 1000, 2),) * 8
    positions = torch.zeros(1, 1, dtype=torch.int64)
    async with playing(service, "rpc_forward") as ask:
        request = ForwardRequest(version=VERSION, start=2, end=6, hidden=HIDDEN, position_ids=positions, prefix=prefix)
        answer = await ask(request)
        assert isinstance(answer, Failure)
        assert answer.message == "prefix and sequence have 1001 tokens, the limit is 256: shorten the prefix"


@pytest.mark.parametrize("rpc", ["rpc_forward", "rpc_session"])
async def test_an_answer_too_large_to_be_sent_is_not_computed(
    service: Service, runner: FakeRunner, rpc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three tokens fit as one hidden state, not as one of each of four blocks.
    hidden = torch.ones(1, 3, WIDTH)
    monkeypatch.setattr(limits, "MAX_ANSWER_BYTES", 2 * hidden.nbytes)
    async with playing(service, rpc) as ask:
        if rpc == "rpc_session":
            await ask(OPEN)
        message: Message = (
            SessionStep(hidden=hidden, cached_tokens=0)
            if rpc == "rpc_session"
            else ForwardRequest(version=VERSION, start=2, end=6, hidden=hidden)
        )
        answer = await ask(msgspec.structs.replace(message, collect_hidden=True))
        assert isinstance(answer, Failure)
        assert answer.kind == "bad_request"
        assert "4 hidden states of 48 bytes = 192 bytes, the limit is 96" in answer.message
        assert runner.events == []
        assert not isinstance(await ask(message), Failure)


HOSTILE: dict[str, dict[str, Any]] = {
    "hidden-nan": {"hidden": HIDDEN * torch.nan},
    "hidden-integers": {"hidden": HIDDEN.long()},
    "hidden-width": {"hidden": torch.ones(1, 1, WIDTH + 1)},
    "hidden-empty": {"hidden": torch.ones(1, 0, WIDTH)},
    "hidden-rank": {"hidden": HIDDEN[0]},
    "hidden-rows": {"hidden": torch.ones(300, 1, WIDTH)},
    "hidden-length": {"hidden": torch.ones(1, MAX_POSITIONS + 1, WIDTH)},
    "positions-beyond": {"position_ids": torch.full((1, 1), MAX_POSITIONS)},
    "positions-negative": {"position_ids": torch.full((1, 1), -1)},
    "positions-rows": {"position_ids": torch.zeros(2, 1, dtype=torch.int64)},
    "positions-length": {"position_ids": torch.zeros(1, 2, dtype=torch.int64)},
    "positions-rank": {"position_ids": torch.zeros(1, dtype=torch.int64)},
    "positions-floats": {"position_ids": torch.zeros(1, 1)},
    "mask-floats": {"attention_mask": torch.ones(1, 1)},
    "mask-length": {"attention_mask": torch.ones(1, 2, dtype=torch.bool)},
    "mask-rows": {"attention_mask": torch.ones(2, 1, dtype=torch.bool)},
    "adapter-rows": {"adapter_rows": (-1, -1)},
    "adapter-row-beyond": {"adapter_rows": (0,)},
    "adapter-row-negative": {"adapter_rows": (-2,)},
    "adapter-unknown": {"adapters": ("unknown",)},
}
STATELESS: dict[str, dict[str, Any]] = {
    "seed-negative": {"dropout_seed": -1},
    "prefix-nan": {"prefix": (torch.full((1, 1, 2, 2), torch.nan),) * 8},
    "prefix-integers": {"prefix": (torch.ones(1, 1, 2, 2, dtype=torch.int64),) * 8},
    "prefix-few": {"prefix": (torch.ones(1, 1, 2, 2),) * 7},
    "prefix-heads": {"prefix": (torch.ones(1, 2, 2, 2),) * 8},
    "prefix-lengths": {"prefix": (torch.ones(1, 1, 2, 2),) * 7 + (torch.ones(1, 1, 3, 2),)},
    "prefix-rows": {"prefix": (torch.ones(2, 1, 2, 2),) * 8},
    "prefix-rank": {"prefix": (torch.ones(1, 1, 2),) * 8},
    "blocks-elsewhere": {"start": 0},
    "blocks-reversed": {"start": 5, "end": 3},
}


@pytest.mark.parametrize(
    ("rpc", "changes"),
    [
        pytest.param(rpc, changes, id=f"{rpc.removeprefix('rpc_')}-{name}")
        for rpc in ("rpc_forward", "rpc_backward", "rpc_session")
        for name, changes in (HOSTILE if rpc == "rpc_session" else HOSTILE | STATELESS).items()
    ],
)
async def test_every_door_refuses_what_does_not_fit(
    service: Service, runner: FakeRunner, rpc: str, changes: dict[str, Any]
) -> None:
    def message(**changes: Any) -> Message:
        if rpc == "rpc_session":
            return SessionStep(**{"hidden": HIDDEN, "cached_tokens": 0, **changes})
        request = ForwardRequest(**{"version": VERSION, "start": 2, "end": 6, "hidden": HIDDEN, **changes})
        return BackwardRequest(forward=request, grad_hidden=HIDDEN) if rpc == "rpc_backward" else request

    async with playing(service, rpc) as ask:
        if rpc == "rpc_session":
            await ask(OPEN)
        answer = await ask(message(**changes))
        assert isinstance(answer, Failure)
        assert answer.kind in ("bad_request", "not_finite", "unknown_adapter", "wrong_span")
        assert runner.events == []
        assert not isinstance(await ask(message()), Failure)
