"""Failed allocations are a sentence of ours to the client, whoever raises them."""

from __future__ import annotations

import pytest
import torch
from fake_server import VERSION, WIDTH, FakeRunner, playing

from swarm_plugins.errors import CapacityError
from swarm_plugins.ledger import BusyError
from swarm_plugins.server.failures import failure_of
from swarm_plugins.server.service import Service
from swarm_plugins.transport.messages import Failure, ForwardRequest

OURS = "this server is out of memory: send less at once, or use another server"


def torch_cpu() -> None:
    torch.empty(1 << 60)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of"),
        RuntimeError("CUDA error: out of memory"),
    ],
    ids=["python", "cpu", "cuda", "cuda-runtime"],
)
def test_failed_allocations_do_not_show_what_failed(error: Exception) -> None:
    assert failure_of(error, peer="a", rpc="rpc_forward") == Failure(kind="out_of_memory", message=OURS)


def test_budgets_say_what_they_hold() -> None:
    full, busy = CapacityError("9 of 10 bytes"), BusyError("wait for answers")
    assert failure_of(full, peer="a", rpc="r") == Failure(kind="out_of_memory", message="9 of 10 bytes")
    assert failure_of(busy, peer="a", rpc="r") == Failure(kind="overloaded", message="wait for answers")


async def test_a_run_that_finds_no_memory_is_answered_and_the_server_goes_on(
    service: Service, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ForwardRequest(version=VERSION, start=2, end=6, hidden=torch.ones(1, 1, WIDTH))
    async with playing(service) as ask:
        with monkeypatch.context() as patch:
            patch.setattr(runner, "forward", lambda _: torch_cpu())
            answer = await ask("rpc_forward", request)
            assert answer == Failure(kind="out_of_memory", message=OURS)
        assert not isinstance(await ask("rpc_forward", request), Failure)
        assert service.ledger.used == 0
