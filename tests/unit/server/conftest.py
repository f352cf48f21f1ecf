from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_server import TOKEN_BYTES, VERSION, FakeRunner

from swarm_plugins.blocks.kv import KVPool
from swarm_plugins.server import limits
from swarm_plugins.server.compute.scheduler import Scheduler
from swarm_plugins.server.service import Service
from swarm_plugins.server.state.activations import ActivationStore
from swarm_plugins.server.state.adapter_store import AdapterStore
from swarm_plugins.server.state.prefixes import PrefixStore
from swarm_plugins.server.state.sessions import SessionTable
from swarm_plugins.transport.server_info import ServerInfo


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def scheduler(runner: FakeRunner) -> Iterator[Scheduler]:
    scheduler = Scheduler(runner, chunk_tokens=64, max_waiting_steps=16, max_waiting_trainings=8)
    scheduler.start()
    yield scheduler
    scheduler.close()


@pytest.fixture
def service(runner: FakeRunner, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr(limits, "MAX_KV_SHARE", 1.0)
    info = ServerInfo(version=VERSION, model="tiny", num_blocks=8, start=2, end=6, dtype="float32", quantization="none")
    return Service(
        announced=info,
        runner=runner,
        scheduler=scheduler,
        max_batch_tokens=256,
        max_session_tokens=100,
        kv_bytes=200 * TOKEN_BYTES,
        activations=ActivationStore(1 << 20),
        adapters=AdapterStore(1 << 16),
        sessions=SessionTable(3),
        prefixes=PrefixStore(KVPool(1)),
    )
