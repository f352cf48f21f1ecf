"""Blocks without a server run here: same tokens, losses and gradients, until the swarm has them again."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_plugins.backbone import AutoSwarmModelForCausalLM
from swarm_plugins.book.record import PeerBook
from swarm_plugins.client import SwarmConfig
from swarm_plugins.errors import MissingBlocksError
from swarm_plugins.fallback import stand_in as stand_in_module
from swarm_plugins.fallback.stand_in import StandIn, _Hosted
from swarm_plugins.testing import InProcessSwarm, save_tiny

IDS = torch.tensor([[5, 17, 99, 23, 64, 9], [31, 64, 9, 88, 12, 7]])
CONFIG = SwarmConfig(local_fallback=True, refresh_s=0.0001)


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp("models") / request.param)


def local_model(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, experts_implementation="swarm_table").eval()


def train(model: Any, losses: list[float], steps: int) -> None:
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.5)
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())


def with_lora(model: PreTrainedModel) -> Any:
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def generated(model: PreTrainedModel) -> list[list[int]]:
    return model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None).tolist()


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def num_computing_of(served: list[Any]) -> int:
    return sum(one.service.scheduler._thread._thread is not None for one in served)


def test_work_goes_on_when_servers_go_and_moves_back_when_they_return(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_plugins.fallback.stand_in._LOOK_S", 0.05)
    local = local_model(directory)
    want, losses, wanted_losses = generated(local), [], []
    train(with_lora(local), wanted_losses, 6)
    with InProcessSwarm(directory, spans=[(0, 2), (2, 4)], config=CONFIG) as swarm:
        model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        assert generated(model) == want
        swarm.kill("peer1")
        assert generated(model) == want
        tuned = with_lora(model)
        train(tuned, losses, 2)
        swarm.kill("peer0")
        train(tuned, losses, 2)
        swarm.restart("peer0")
        swarm.restart("peer1")
        [stand_in] = [one for one in swarm.connection._helpers if isinstance(one, StandIn)]
        served = [one.served for one in stand_in._hosted.values()]
        assert served
        train(tuned, losses, 1)
        assert stand_in._hosted
        monkeypatch.setattr("swarm_plugins.fallback.stand_in._IDLE_S", 0.0)
        train(tuned, losses, 1)
        wait_until(lambda: not stand_in._hosted)
        wait_until(lambda: not stand_in._local._running)
        wait_until(lambda: not num_computing_of(served))
        assert losses == pytest.approx(wanted_losses, rel=1e-5)
        # They started empty: the last steps ran on them.
        assert all(service.adapters.used_bytes > 0 for service in swarm.services.values())


def num_computing() -> int:
    return sum(thread.name == "swarm-compute" for thread in threading.enumerate())


def test_blocks_of_a_model_that_is_gone_are_freed(directory: Path) -> None:
    with InProcessSwarm(directory, spans=[(1, 2)], config=CONFIG) as swarm:
        before = num_computing()
        for _ in range(2):
            model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
            generated(model)
            assert num_computing() == before + 2
            del model
            deadline = time.monotonic() + 30.0
            while num_computing() > before:
                # Again and again: sessions of the model close in the background.
                gc.collect()
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_a_model_loads_though_nobody_serves_it(directory: Path) -> None:
    with InProcessSwarm(directory, spans=[(1, 2)], config=CONFIG) as swarm:
        model = AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)
        assert generated(model) == generated(local_model(directory))


async def test_servers_that_claim_other_blocks_by_turns_make_no_block_load_twice(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[int] = []

    def host(self: StandIn, blocks: range) -> Any:
        loaded.extend(blocks)
        return _Hosted(f"here{len(loaded)}", blocks, Mock(handlers={}))

    monkeypatch.setattr(StandIn, "_host", host)
    stand_in = StandIn(Mock(end=AsyncMock()), PeerBook(), Mock())
    for start, stop in [(1, 2), (0, 2), (1, 3), (2, 3), (0, 4), (1, 4)]:
        chain = await stand_in.stand_in(range(start, stop))
        assert [block for one in chain for block in range(one.start, one.end)] == list(range(start, stop))
    assert sorted(loaded) == [0, 1, 2, 3]
    await stand_in.close()


class Loading:
    """Loads nothing, and holds the thread that would until the gate is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[_Hosted] = []
        self.has_begun, self.gate, self.has_closed = threading.Event(), threading.Event(), threading.Event()
        monkeypatch.setattr(StandIn, "_host", lambda _, blocks: self._host(blocks))

    def _host(self, blocks: range) -> _Hosted:
        self.has_begun.set()
        self.gate.wait(30.0)
        served = Mock(handlers={}, close=Mock(side_effect=self.has_closed.set))
        self.made.append(_Hosted(f"here{len(self.made)}", blocks, served))
        return self.made[-1]

    async def cancelled(self, stand_in: StandIn) -> None:
        """Asks for blocks, and gives up while they are loaded."""
        task = asyncio.create_task(stand_in.stand_in(range(2)))
        await asyncio.to_thread(self.has_begun.wait, 30.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_blocks_whose_caller_was_cancelled_are_there_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, stand_in = Loading(monkeypatch), StandIn(Mock(end=AsyncMock()), PeerBook(), Mock())
    await loading.cancelled(stand_in)
    loading.gate.set()
    assert [one.peer for one in await stand_in.stand_in(range(2))] == ["here0"]
    await stand_in.close()
    assert [one.served.close.call_count for one in loading.made] == [1]  # type: ignore[attr-defined]


async def test_blocks_that_come_after_the_end_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, stand_in = Loading(monkeypatch), StandIn(Mock(end=AsyncMock()), PeerBook(), Mock())
    await loading.cancelled(stand_in)
    await stand_in.close()
    loading.gate.set()
    assert await asyncio.to_thread(loading.has_closed.wait, 30.0)
    assert not stand_in._hosted


async def test_no_block_of_a_chain_is_freed_while_others_load(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(stand_in_module, "_LOOK_S", 0.0)
    monkeypatch.setattr(stand_in_module, "time", SimpleNamespace(monotonic=lambda: now))
    loading, book = Loading(monkeypatch), MagicMock()
    book.__getitem__.return_value.ran_at = 0.0
    server = Mock(ran_at=0.0)
    book.records.return_value = {"server": server}
    stand_in = StandIn(Mock(end=AsyncMock()), book, Mock())
    loading.gate.set()
    await stand_in.stand_in(range(1))
    loading.gate.clear()
    loading.has_begun.clear()
    chain = asyncio.create_task(stand_in.stand_in(range(2)))
    await asyncio.to_thread(loading.has_begun.wait, 30.0)
    # Others run all the time, and many looks are taken, while the second block loads and right after.
    now = server.ran_at = 1000.0
    await many_looks()
    loading.gate.set()
    peers = {one.peer for one in await chain}
    await many_looks()
    assert peers == set(stand_in._hosted) == {"here0", "here1"}
    await stand_in.close()


async def many_looks() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def test_without_it_missing_blocks_are_an_error(directory: Path) -> None:
    with InProcessSwarm(directory, spans=[(1, 2)]) as swarm, pytest.raises(MissingBlocksError, match="blocks 0:1, 2:4"):
        AutoSwarmModelForCausalLM.from_pretrained(directory, connection=swarm.connection)


async def test_nothing_is_loaded_for_a_model_that_was_closed() -> None:
    stand_in = StandIn(Mock(end=AsyncMock()), PeerBook(), pytest.fail)
    await stand_in.close()
    with pytest.raises(asyncio.CancelledError):
        await stand_in.stand_in(range(1))
