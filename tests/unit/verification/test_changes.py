"""What changes while a server is checked, or fails on the way, accuses no honest server."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from lies_kit import IDS, all_checked, finish_checks, train, verifier_of
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from swarm_plugins.book import judging
from swarm_plugins.checkpoint import Checkpoint
from swarm_plugins.client import SwarmConfig
from swarm_plugins.client.calls.hedging import Hedged
from swarm_plugins.errors import CapacityError, CheckpointError
from swarm_plugins.routing import Demand
from swarm_plugins.testing import InProcessSwarm, save_tiny
from swarm_plugins.verification import Quarantine, examiner
from swarm_plugins.verification.local_blocks import LocalBlocks

WHOLE, OPENED = SwarmConfig(verify="on"), SwarmConfig(verify="on", verify_bytes=0)


@pytest.fixture(autouse=True)
def _no_one_is_accused(cache: Path) -> Iterator[None]:
    yield
    assert not Quarantine(cache / "quarantine").peers()


def forward(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    finish_checks(model)


def generate(model: PreTrainedModel, **options: Any) -> None:
    model.generate(IDS, max_new_tokens=10, do_sample=False, **options)
    finish_checks(model)


@pytest.mark.parametrize("is_first_checked", [False, True])
def test_other_weights_in_the_client_s_directory(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_first_checked: bool
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(llama, directory)
    other = save_tiny("llama", tmp_path / "other", seed=7)
    with InProcessSwarm(directory, spans=[(0, 4)], config=OPENED) as swarm:
        model = all_checked(swarm)
        if is_first_checked:
            forward(model)
        (other / "model.safetensors").replace(directory / "model.safetensors")
        forward(model)
    assert "has changed since the model was loaded" in caplog.text


def test_a_checkpoint_that_has_changed_is_not_opened_for_each_token(llama: Path) -> None:
    def changed() -> Checkpoint:
        openings.append(1)
        raise CheckpointError("it has changed")

    openings: list[int] = []
    with InProcessSwarm(llama, spans=[(0, 4)], config=WHOLE) as swarm:
        model = all_checked(swarm)
        verifier_of(model)._blocks._open = changed
        generate(model)
    assert len(openings) == 1


@pytest.mark.parametrize("config", [WHOLE, OPENED], ids=["whole", "opened"])
def test_a_server_that_comes_back_in_another_type(llama: Path, config: SwarmConfig) -> None:
    with InProcessSwarm(llama, spans=[(0, 4)], config=config) as swarm:
        model = all_checked(swarm)
        forward(model)
        swarm.dtype = torch.bfloat16
        swarm.kill(swarm.peers[0])
        swarm.restart(swarm.peers[0])
        generate(model)


def test_a_backward_that_a_replica_has_answered(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Hedged.ask

    async def late(self: Hedged, call: Any, peer: str) -> Any:
        if call.rpc != "rpc_backward":
            return await ask(self, call, peer)
        other = self._view.replica(call.blocks, Demand(tokens=call.tokens), without={peer, *call.excluded})
        assert other is not None
        return await self._inner.ask(call, other)

    monkeypatch.setattr(Hedged, "ask", late)
    with InProcessSwarm(llama, spans=[(0, 4), (0, 4)], config=WHOLE) as swarm:
        model = get_peft_model(all_checked(swarm), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        for _ in range(2):
            model(input_ids=IDS, labels=IDS).loss.backward()
        finish_checks(model)
        assert set(verifier_of(model).checker.checked) == set(swarm.peers)
        assert not judging.bans(swarm.connection.peers.book)


@pytest.mark.parametrize("message", ["no room", "CUDA out of memory"])
def test_too_little_memory_there_or_here(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, message: str
) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise CapacityError(message)

    def failed(*_: object) -> None:
        raise torch.OutOfMemoryError(message)

    if message == "no room":
        monkeypatch.setattr(examiner, "open_blocks", refused)
    else:
        monkeypatch.setattr(LocalBlocks, "_span", failed)
    config = OPENED if message == "no room" else WHOLE
    with InProcessSwarm(llama, spans=[(0, 4)], config=config) as swarm:
        train(swarm, steps=1)
        generate(all_checked(swarm))
    assert message in caplog.text
    assert "failed (failure" not in caplog.text


def test_a_session_longer_than_what_the_server_takes_at_once(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with InProcessSwarm(llama, spans=[(0, 4)], config=OPENED) as swarm:
        service = swarm.services[swarm.peers[0]]
        info = msgspec.structs.replace(service.info(), max_batch_tokens=16)
        service.info = lambda: info
        service.max_batch_tokens = 16
        generate(all_checked(swarm))
    assert "24 tokens are more than the server takes at once" in caplog.text
    assert "failed (failure" not in caplog.text


@pytest.mark.parametrize("config", [WHOLE, OPENED], ids=["whole", "opened"])
def test_positions_that_depend_on_the_longest_one(tmp_path: Path, config: SwarmConfig) -> None:
    directory = save_tiny("llama", tmp_path / "longrope")
    settings = json.loads((directory / "config.json").read_text())
    settings["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    }
    (directory / "config.json").write_text(json.dumps(settings))
    with InProcessSwarm(directory, spans=[(0, 4)], config=config) as swarm:
        generate(all_checked(swarm))


def test_a_check_that_broke_off_between_two_blocks(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extend, calls = LocalBlocks.extend, []

    async def broken(self: LocalBlocks, *args: Any) -> torch.Tensor:
        found = await extend(self, *args)
        calls.append(1)
        if len(calls) == 2:
            raise CapacityError("no room for the last block")
        return found

    monkeypatch.setattr(LocalBlocks, "extend", broken)
    with InProcessSwarm(llama, spans=[(0, 4)], config=WHOLE) as swarm:
        model = all_checked(swarm)
        book = swarm.connection.peers.book
        book.rules = dataclasses.replace(book.rules, uncheckable_s=0.0)
        generate(model)
    assert len(calls) == 2


def test_rows_that_change_their_adapter_during_a_session(llama: Path) -> None:
    with InProcessSwarm(llama, spans=[(0, 4)], config=WHOLE) as swarm:
        base = all_checked(swarm)
        lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(base, lora, adapter_name="one")
        model.add_adapter("two", lora)
        model.eval()
        with torch.no_grad():
            cache = model(input_ids=IDS, adapter_names=["one", "two"]).past_key_values
            for names in (["two", "one"], ["two", "two"], ["one", "__base__"]):
                model(input_ids=IDS[:, :1], past_key_values=cache, adapter_names=names)
        finish_checks(base)
        assert verifier_of(base).checker.checked
