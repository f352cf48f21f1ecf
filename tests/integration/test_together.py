"""Trainers in processes of their own improve one adapter: one is killed, one late, one sends garbage."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import run_process
import torch
import trainer_kit
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model
from run_process import RUN, Process, check_survivors
from torch.utils.data import DataLoader

import swarm_plugins.transport.dht
from swarm_plugins import AutoSwarmModelForCausalLM, FabricSwarmStrategy, RunConfig, SwarmStrategy
from swarm_plugins.errors import CheckpointError, ConfigError
from swarm_plugins.local_hub import LocalHub

pytestmark = trainer_kit.IN_A_RUN
# Fixtures.
model, swarm, peers = trainer_kit.model, trainer_kit.swarm, trainer_kit.peers
start, warm_trainers = run_process.start, run_process.warm_trainers


def test_survivors_have_the_same_adapter_after_each_of_twenty_rounds(start: Callable[..., Process]) -> None:
    check_survivors(start, num_rounds=20)


def test_a_peer_that_is_slower_than_the_deadline_is_shown_as_late(start: Callable[..., Process]) -> None:
    run = {"straggler_s": 0.5}
    first, slow = start(0, step_s=0.05, run=run), start(1, step_s=3.0, run=run)
    for one in (first, slow):
        one.begin()
        one.reaches(0)
    first.wait_for(lambda one: (one.lines[-1].get("peers"), one.lines[-1].get("late")) == (2, 1))
    slow.kill()
    first.wait_for(lambda one: (one.lines[-1].get("peers"), one.lines[-1].get("late")) == (1, 0))


def test_one_peer_publishes_for_all_and_another_one_after_it_has_left(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    with LocalHub() as hub:
        members = [start(seed, step_s=0.1, hub=hub.endpoint, folder=str(tmp_path / str(seed))) for seed in range(3)]
        for one in members:
            one.begin()
        for one in members:
            one.wait_for(lambda one: one.lines[-1].get("peers") == 3)

        def is_told(one: Process) -> bool:
            since = max(line["round"] for line in one.lines if "round" in line)
            one.reaches(since + 1)
            return bool(one.lines[-1]["publishes"])

        (elected,) = [one for one in members if is_told(one)]
        other, last = [one for one in members if one is not elected]
        for leaving, pushed in ((other, 0), (elected, 1), (last, 1)):
            assert leaving.end() == 0, leaving.errors[-3000:]
            assert leaving.lines[-1] == {"pushed": pushed}
        repo = hub.store.find("me/adapter")
        assert repo is not None
        assert sorted(repo.tags) == ["v1", "v2"]


@pytest.fixture
def companion(start: Callable[..., Process]) -> Process:
    """A peer that trains until the test has ended."""
    one = start(0, step_s=0.05)
    one.begin()
    one.reaches(0)
    return one


def strategy(**settings: Any) -> SwarmStrategy:
    return SwarmStrategy(run_id="me/run", run=RunConfig(**(RUN | settings)))


def fit(model: Path, steps: int, strategy: SwarmStrategy, **options: Any) -> trainer_kit.Tuner:
    tuner = trainer_kit.Tuner(model, AutoSwarmModelForCausalLM)
    ckpt_path = options.pop("ckpt_path", None)
    trainer = trainer_kit.quiet_trainer(strategy=strategy, max_steps=steps, **options)
    trainer.fit(tuner, DataLoader(trainer_kit.ROWS, batch_size=4), ckpt_path=ckpt_path)  # type: ignore[arg-type]
    return tuner


def secret(folder: Path) -> Path:
    path = folder / "secret"
    path.write_text("a secret of the run" * 2)
    path.chmod(0o600)
    return path


def test_peers_that_do_not_belong_are_told_why_and_others_train_on(
    companion: Process, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"enable_checkpointing": False}
    with pytest.raises(ConfigError, match="the secret of run 'me/run' is another one, or is missing"):
        fit(model, 2, strategy(secret_file=secret(tmp_path)), **options)
    with pytest.raises(ConfigError, match=r"rules: .*outer_lr=0.7.*; yours: .*outer_lr=0.5"):
        fit(model, 2, strategy(outer_lr=0.5), **options)
    with monkeypatch.context() as patch:
        patch.setattr(
            trainer_kit, "with_lora", lambda base: get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
        )
        with pytest.raises(ConfigError, match=r"adapter: LORA r=4 .*q_proj,v_proj.*; yours: LORA r=2 .*q_proj"):
            fit(model, 2, strategy(), **options)
    for shift_s, said in ((3600, "ahead of"), (-3600, "behind")):
        with monkeypatch.context() as patch:
            clock = SimpleNamespace(time=lambda shift_s=shift_s: time.time() + shift_s)
            patch.setattr(swarm_plugins.transport.dht, "time", clock)
            with pytest.raises(ConfigError, match=f"clock is 3600 s {said} the swarm's"):
                fit(model, 2, strategy(), **options)
    before = max(companion.digests)
    companion.reaches(before + 1)


def test_a_peer_of_fabric_joins_and_ends_with_what_all_have(companion: Process, model: Path) -> None:
    fabric_strategy = FabricSwarmStrategy(run_id="me/run", run=RunConfig(**RUN))
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=fabric_strategy)
    fabric.launch()
    with fabric.init_module():
        tuned = trainer_kit.with_lora(AutoSwarmModelForCausalLM.from_pretrained(model))
    trainer_kit.fabric_losses(fabric, tuned, 5)
    run = fabric_strategy.shared_run
    assert run is not None
    assert run.progress.peers == 2
    fabric_strategy.finish_run()
    companion.reaches(run._base.round)
    assert companion.digests[run._base.round] == run._base.digest.hex()
    fabric_strategy.teardown()


def test_a_resumed_run_equals_one_that_was_not_interrupted(model: Path, tmp_path: Path) -> None:
    """Two steps an epoch, three a round: the checkpoint is in the middle of a round."""

    def run(folder: str, epochs: int, **options: Any) -> trainer_kit.Tuner:
        callbacks = [ModelCheckpoint(dirpath=tmp_path / folder, filename="last", save_top_k=-1)]
        return fit(
            model,
            -1,
            strategy(steps_per_round=3),
            callbacks=callbacks,
            max_epochs=epochs,
            **options,
        )

    straight = run("straight", 4)
    first = run("first", 2)
    kept = torch.load(tmp_path / "first" / "last.ckpt", weights_only=True)["callbacks"]["RunCallback"]
    assert (kept["run"], kept["steps"]) == ("me/run", 1)
    second = run("second", 4, ckpt_path=tmp_path / "first" / "last.ckpt")
    assert first.losses + second.losses == straight.losses
    for one, other in zip(straight.parameters(), second.parameters(), strict=True):
        assert not one.requires_grad or torch.equal(one, other)


def test_a_checkpoint_joins_peers_that_have_gone_on(companion: Process, model: Path, tmp_path: Path) -> None:
    callbacks = [ModelCheckpoint(dirpath=tmp_path, filename="last", save_top_k=-1)]
    fit(model, 2, strategy(), callbacks=callbacks)
    companion.reaches(max(companion.digests) + 3)
    tuner = fit(model, 5, strategy(), enable_checkpointing=False, ckpt_path=tmp_path / "last.ckpt")
    assert len(tuner.losses) == 3
    state = tuner.trainer.strategy.shared_run.state
    companion.reaches(state.round)
    assert companion.digests[state.round] == state.digest.hex()


def test_a_checkpoint_of_another_run_is_refused(model: Path, tmp_path: Path) -> None:
    callbacks = [ModelCheckpoint(dirpath=tmp_path, filename="last", save_top_k=-1)]
    fit(model, 2, strategy(), callbacks=callbacks)
    other = SwarmStrategy(run_id="me/other", run=RunConfig(**RUN))
    with pytest.raises(CheckpointError, match="belongs to run 'me/run', not to 'me/other'"):
        fit(model, 4, other, enable_checkpointing=False, ckpt_path=tmp_path / "last.ckpt")
